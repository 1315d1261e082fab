"""Attention calls for the fused kernel, each with its scores by the definition.

Queries and keys lie on a grid so coarse that every sum of products is exact: the truth
is that of the scores which the kernel sees, however it adds them up. Run as a program
it reads every case in triton's interpreter, or on a GPU, and prints what it found.

Axes, in this file:  B batch · H head · G key head · Q query · n chosen query · K key.
"""

import json
import math
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.fused_kernels import KernelRows
from equipoise.numerics.rows import torch_rows
from equipoise.numerics.rows.balance import balance
from equipoise.numerics.rows.statistics import row_columns
from equipoise.probes import fused_rows

INF = math.inf


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call by its parts: sizes, and what its rows see."""

    heads: tuple[int, int] = (1, 1)
    sizes: tuple[int, int, int] = (48, 48, 16)
    """Queries, keys and width."""
    batch: int = 1
    scale: float = 0.125
    dtype: torch.dtype = torch.float32
    rows: dict[str, Any] | None = None
    mask: str = ""
    chosen: int = 0
    exact: bool = True
    """Whether float32 computes the scores without rounding."""
    given: tuple[Tensor, Tensor] | None = None
    """Queries and keys of one head, instead of some that are drawn."""


CASES = {
    "grouped heads": Case(heads=(4, 2), sizes=(21, 131, 20)),
    "few keys": Case(sizes=(64, 12, 16), scale=0.5),
    "peaked": Case(sizes=(64, 150, 16), scale=1.0),
    "peaked, many tiles": Case(sizes=(32, 700, 16), scale=1.0),
    "causal, more keys": Case(
        sizes=(70, 90, 16), rows={"causal": True, "offset_S": 20}
    ),
    "window, bfloat16": Case(
        sizes=(90, 90, 64),
        scale=0.0625,
        rows={"causal": True, "left": 9},
        dtype=torch.bfloat16,
    ),
    "ALiBi, float16, 80 wide": Case(
        sizes=(48, 48, 80),
        dtype=torch.float16,
        scale=0.0625,
        rows={"causal": True, "slopes_BH": "some"},
    ),
    "soft-cap, 256 wide": Case(
        sizes=(48, 48, 256), scale=0.03125, rows={"softcap": 3.0}, exact=False
    ),
    "boolean mask": Case(sizes=(33, 40, 16), mask="boolean"),
    "additive mask": Case(sizes=(33, 70, 16), mask="additive"),
    "left padding": Case(heads=(4, 2), batch=2, mask="padding", rows={"causal": True}),
    "documents": Case(sizes=(64, 64, 16), rows={"causal": True, "document": "some"}),
    "documents with more keys": Case(
        sizes=(24, 61, 16), rows={"causal": True, "left": 12, "document": "longer"}
    ),
    "window of two sides, chosen rows": Case(
        sizes=(90, 60, 16), rows={"left": 5, "right": 30}, chosen=40
    ),
    "NaN and infinities": Case(sizes=(20, 40, 16), mask="broken"),
}


def _rows(case: Case, H: int) -> KernelRows:
    """Return the rows; tensors are made where a case names them."""
    given = dict(case.rows or {})
    if "slopes_BH" in given:
        given["slopes_BH"] = torch.tensor([0.25, 0.0625]).repeat(H)[:H]
    if given.get("document") == "longer":
        times = case.sizes[0] // 24
        given |= _documents([3, 12, 9] * times, [20, 12, 29] * times, rest=0)
    elif "document" in given:
        lengths = [1, 20, 40, 3] * (case.sizes[0] // 64)
        given |= {**_documents(lengths, lengths, rest=1), "place": None}
    return KernelRows(**given)


def _documents(queries: list[int], keys: list[int], *, rest: int) -> dict[str, Any]:
    """Return documents of some lengths, ends aligned; the last ``rest`` are none."""
    of, place = [], []
    for n, lengths in enumerate((queries, keys)):
        number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        of.append(number.where(number < len(lengths) - rest, -1 - n))
        more = [b - a for a, b in zip(lengths, keys, strict=True)]
        at = [range(m, m + length) for m, length in zip(more, lengths, strict=True)]
        place.append(torch.tensor([i for r in at for i in r]))
    return {"document": tuple(of), "place": tuple(place)}


def _mask(case: Case, rng: torch.Generator) -> Tensor | None:
    Q, K, _ = case.sizes
    if case.mask == "padding":
        return (torch.arange(K) >= torch.tensor([7, 0])[:, None])[:, None, None]
    drawn = torch.rand(case.batch, 1, Q, K, generator=rng)
    if case.mask == "boolean":
        drawn[:, :, 3] = 0.0  # a row without keys
        drawn[:, :, 4, 1:] = 0.0
        return drawn > 0.6
    if case.mask == "additive":
        added = (8 * drawn).round() / 8
        added[..., :3, 10:] = -1e9
        return added.masked_fill(drawn < 0.2, -INF)
    if case.mask == "broken":
        added = torch.zeros_like(drawn)
        added[:, :, 3, 5], added[:, :, 4, 6], added[:, :, 5] = math.nan, INF, -INF
        return added
    return None


def made(case: Case, seed: int, device: str) -> tuple[AttentionCall, Tensor | None]:
    """Return the call, and the chosen queries."""
    rng = torch.Generator().manual_seed(seed)
    (H, G), (Q, K, D), B = case.heads, case.sizes, case.batch
    q, k = (
        (torch.randint(-16, 17, (B, h, n, D), generator=rng) / 8).to(case.dtype)
        for h, n in ((H, Q), (G, K))
    )
    if case.given is not None:
        q, k = (x[None, None] for x in case.given)
    rows = _rows(case, H)
    names = ("slopes_BH", "document", "place")
    moved = {name: getattr(rows, name) for name in names}
    moved = {name: _to(x, device) for name, x in moved.items() if x is not None}
    if moved:
        rows = KernelRows(**{**_plain(rows), **moved})
    mask = _mask(case, rng)
    call = AttentionCall(
        module=None,
        kind="kernel",
        q_BHQD=q.to(device),
        k_BGKD=k.to(device),
        mask=None if mask is None else mask.to(device),
        causal=rows.plain and rows.causal,
        scale=case.scale,
        modify=None if rows.plain else rows.modify,
    )
    some = torch.randperm(Q, generator=rng)[: case.chosen].sort().values
    return call, some if case.chosen else None


def _plain(rows: KernelRows) -> dict[str, Any]:
    names = ("causal", "left", "right", "softcap", "offset_S")
    return {name: getattr(rows, name) for name in names}


def _to(x: Any, device: str) -> Any:
    return tuple(y.to(device) for y in x) if isinstance(x, tuple) else x.to(device)


def scores(case: Case, seed: int) -> Tensor:
    """Return (B, H, Q, K) in float64 by the definition, hidden keys at -inf."""
    call, _ = made(case, seed, "cpu")
    assert call.q_BHQD is not None and call.k_BGKD is not None
    H, G = case.heads
    k = call.k_BGKD.double().repeat_interleave(H // G, 1)
    z = case.scale * torch.einsum("bhqd,bhkd->bhqk", call.q_BHQD.double(), k)
    rows = _rows(case, H)
    if rows.softcap:
        z = rows.softcap * torch.tanh(z / rows.softcap)
    i, j = torch.arange(case.sizes[0])[:, None], torch.arange(case.sizes[1])[None]
    ahead = j - i - rows.offset_S
    if rows.place is not None:
        ahead = rows.place[1][None] - rows.place[0][:, None]
    if rows.slopes_BH is not None:
        z = z - rows.slopes_BH[:, None, None].double() * ahead.abs()
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    hidden |= (ahead > 0) & rows.causal
    hidden |= (ahead > rows.right) & (rows.right >= 0)
    hidden |= (ahead < -rows.left) & (rows.left >= 0)
    if rows.document is not None:
        hidden |= rows.document[0][:, None] != rows.document[1][None]
    if call.mask is not None and call.mask.dtype == torch.bool:
        hidden = hidden | ~call.mask
    elif call.mask is not None:
        z = z + call.mask.double()
        hidden = hidden | (z <= -9e3)
    return z.masked_fill(hidden, -INF)


def compared_torch(case: Case, seed: int) -> dict[str, int]:
    """Return the torch path's counts of ``compared``, without the kernel."""
    _, chosen = made(case, seed, "cpu")
    z = scores(case, seed)
    z = (z if chosen is None else z[:, :, chosen]).flatten(0, 2)
    broken = (z.isnan() | (z == INF)).any(-1)
    z = z[(z > -INF).any(-1) & ~broken]
    truth, theirs = balance(z.softmax(-1)), row_columns(z.float(), sort_open=True)
    low, high, *_ = torch_rows.columns(z.float()).double()
    slack = 1e-14 if case.exact else 4e-6
    missed = (low > truth.upper + slack) | (high < truth.lower - slack)
    off = (low - theirs[0]).abs() > 1e-6
    counts = {"missed": missed, "wide": high - low > 1e-4, "off": off}
    found = {f"torch {name}": int(x.sum()) for name, x in counts.items()}
    return {"torch rows": len(z), **found}


def compared(case: Case, seed: int, device: str = "cpu") -> dict[str, Any]:
    """Return what kernel and torch path read of a case beside the truth, and how often
    ``lower`` is that of the CPU's kernel."""
    call, chosen = made(case, seed, device)
    assert fused_rows.readable(call), case
    read = fused_rows.fused_columns(call, chosen).cpu().transpose(1, 2).double()
    z = scores(case, seed)
    z = z if chosen is None else z[:, :, chosen]
    read, z = read.flatten(1), z.flatten(0, 2)
    broken = (z.isnan() | (z == INF)).any(-1)
    visible = (z > -INF).sum(-1).where(~broken, 0)
    sound = visible > 0
    p = z[sound].softmax(-1)
    truth, theirs = balance(p), row_columns(z[sound].float(), sort_open=True).double()
    slack = 1e-14 if case.exact else 4e-6
    by_torch = torch_rows.columns(z[sound].float().to(device)).cpu().double()
    paths = {"": read[:, sound], "torch ": by_torch}
    first = _first(call, case, chosen)[sound]
    pairs = zip(read[2:, sound], _columns(z[sound], p, first), strict=True)
    error = max(((a - b).abs() / b.abs().clamp(min=1)).max() for a, b in pairs)
    dark = (visible == 0) & ~broken
    return {
        "rows": int(sound.sum()),
        "torch rows": int(sound.sum()),
        **{
            f"{name}{key}": int(counted.sum())
            for name, (low, high, *_) in paths.items()
            for key, counted in {
                "missed": (low > truth.upper + slack) | (high < truth.lower - slack),
                "wide": high - low > 1e-4,
                "off": (low - theirs[0]).abs() > 1e-6,
            }.items()
        },
        "error": float(error),
        "broken": read[[0, 1, 3, 4, 5]][:, broken].isnan().all().item(),
        "dark": (read[[0, 1, 3, 4, 5, 6, 7, 8]][:, dark] == 0).all().item()
        and (read[2, dark] == -INF).all().item(),
    }


def _first(call: AttentionCall, case: Case, chosen: Tensor | None) -> Tensor:
    """Return the first key of each row's sequence, as the blocks of torch find it."""
    (H, _), (Q, _, _), B = case.heads, case.sizes, case.batch
    found = call.first_key_BQ()
    first_BQ = torch.zeros(B, Q, dtype=torch.long) if found is None else found.cpu()
    first_BQ = first_BQ if chosen is None else first_BQ[:, chosen]
    return first_BQ[:, None].expand(B, H, -1).flatten()


def _columns(z: Tensor, p: Tensor, first: Tensor) -> list[Tensor]:
    """Return the other columns by their definitions."""
    seen = z.masked_fill(z == -INF, 0.0)
    return [
        z.amax(-1),
        -torch.special.xlogy(p, p).sum(-1),
        p.gather(1, first[:, None])[:, 0],
        p.amax(-1),
        seen.square().sum(-1),
        p.square().sum(-1),
        (z > -INF).sum(-1).double(),
        z.logsumexp(-1),
    ]


def _in_large_blocks(columns: Any, q: Tensor, *args: Any, **given: Any) -> Tensor:
    """The interpreter takes as long for a program of many rows as for one of few."""
    chosen = given.get("chosen_n")
    rows = q.shape[2] if chosen is None else len(chosen)
    block = min(max(16, 1 << (rows - 1).bit_length()), 1024)
    found: Tensor = columns(q, *args, block=block, **given)
    return found


def enter(device: str) -> None:
    """Have the kernel read calls of a device, with blocks that suit the interpreter."""
    from equipoise.numerics.rows import triton_rows

    fused_rows.DEVICES.add(device)
    if device == "cpu":
        triton_rows.columns = partial(_in_large_blocks, triton_rows.columns)


if __name__ == "__main__":
    torch.set_num_threads(1)
    enter(sys.argv[1])
    asked = sys.argv[2:] or CASES
    print(json.dumps({x: compared(CASES[x], 0, sys.argv[1]) for x in asked}))
