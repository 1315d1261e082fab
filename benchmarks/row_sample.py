"""A sample of rows: how often its 95 % intervals hold, its largest logit, its cost.

Intervals are counted over (head, step) pairs of models in training and of made-up
heads, each sampled many times. A reading that every sample of a pair gives alike is
held by any interval: such pairs are not counted. The largest logit of one row in four
is set beside that of all rows, for each head and for the largest of all heads, which
rules look at.

Run: python -m benchmarks.row_sample [coverage] [logits] [cost]
"""

import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.fragility_subjects import minilm
from benchmarks.table import publish
from benchmarks.text import standard_library
from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.discovery import anatomy_of
from equipoise.anatomy.interception import Interceptor
from equipoise.numerics.rows.statistics import row_columns
from equipoise.probes.attention import QUANTILES, AttentionRows, rows_of_call
from equipoise.probes.row_sample import (
    chosen_queries,
    query_weights,
    sampling_errors,
    weighted_mean,
    weighted_quantiles,
)
from tests.models import GPT, GPTConfig

QUERIES, ROWS, SAMPLES, HEADS = 2048, 512, 100, 16
LEVELS = {name: QUANTILES[name] for name in ("p5", "p50")}
SAME = 1e-6
"""Readings closer than this are the same: θ of a row is known to so much."""
LENGTH, CALL_HEADS, WIDTH, REPEATS = 8192, 2, 64, 5
SHORT = 512
"""Tokens of the calls whose largest logits are compared."""


class Rows(NamedTuple):
    """θ and the largest logit of every row of some heads."""

    theta_HQ: Tensor
    logit_HQ: Tensor


def rows_of(model: nn.Module, passes: Callable[[], object]) -> Rows:
    """Return all heads of all layers, of one pass."""
    found: list[Rows] = []

    def read(call: AttentionCall) -> None:
        rows = rows_of_call(call, None)
        theta = rows.theta_lower.where(rows.counted, torch.nan)
        found.append(Rows(theta, rows.max_logit.where(rows.counted, -torch.inf)))

    with torch.no_grad(), Interceptor(anatomy_of(model), read):
        passes()
    return Rows(*(torch.cat(column) for column in zip(*found, strict=True)))


def trained(
    rate: float, seed: int, *, tokens: int = QUERIES, times: float = 1.0
) -> list[Rows]:
    """Return a small GPT at five steps of its training.

    ``times`` scales the maps to queries and keys before it, as storms of logit growth
    do (``equipoise lab run storms``).
    """
    torch.manual_seed(seed)
    model = GPT(GPTConfig(width=64, depth=2, heads=4, context=tokens))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(times)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    text, found = standard_library(), []
    starts = torch.randperm((len(text) - 1) // tokens)[:61] * tokens
    for step, start in enumerate(starts.tolist()):
        window = text[None, start : start + tokens + 1]
        ids, targets = window[:, :-1], window[:, 1:]
        if step % 15 == 0:
            found.append(rows_of(model, lambda ids=ids: model(ids)))
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def trained_theta(rate: float, seed: int) -> Tensor:
    """Return θ of every head at five steps, (pairs, 1, Q)."""
    return torch.cat([rows.theta_HQ for rows in trained(rate, seed)])[:, None]


def encoder() -> list[Rows]:
    """Return a trained sentence encoder on as many tokens as it takes."""
    model, batch = minilm(long=True)
    cut = {name: x.repeat(1, 9)[:, :SHORT] for name, x in batch.items()}
    return [rows_of(model, lambda: model(**cut))]


def made_up(scale: float, *, sizes: float = 0.0, window: float = 0.0) -> Tensor:
    """θ of causal rows of random queries and keys, (heads, 1, Q).

    Queries differ in size by ``sizes`` (in ln), scores fall by ``window`` per key.
    """
    rng = torch.Generator().manual_seed(int(100 * (scale + sizes + window)))
    rows = []
    for _ in range(HEADS):
        q, k = (torch.randn(QUERIES, 32, generator=rng) for _ in range(2))
        q *= (sizes * torch.randn(QUERIES, 1, generator=rng)).exp()
        z = scale / 32**0.5 * (q @ k.mT)
        at = torch.arange(QUERIES)
        read = row_columns(z - window * (at[:, None] - at).abs(), causal_from=0)
        rows.append(read[0].masked_fill(read[8] < 2, torch.nan))
    return torch.stack(rows)[:, None]


def drifting() -> Tensor:
    """θ that falls along the sequence, with noise that its neighbours share."""
    rng = torch.Generator().manual_seed(0)
    own, shared = (torch.randn(HEADS, 1, QUERIES // n, generator=rng) for n in (1, 64))
    place = torch.linspace(2, -2, QUERIES)
    return (place + 0.5 * own + 0.5 * shared.repeat_interleave(64, -1)).sigmoid()


POPULATIONS: dict[str, Callable[[], Tensor]] = {
    "GPT in training, rate 0.003": lambda: trained_theta(0.003, 10),
    "GPT in training, rate 0.03": lambda: trained_theta(0.03, 11),
    "random scores, scale 2": lambda: made_up(2.0),
    "random scores, scale 4": lambda: made_up(4.0),
    "random scores, scale 8": lambda: made_up(8.0),
    "queries of different sizes": lambda: made_up(3.0, sizes=0.7),
    "near keys preferred": lambda: made_up(2.0, window=0.02),
    "a drift along the sequence": drifting,
}


LOGITS: dict[str, Callable[[], list[Rows]]] = {
    "MiniLM": encoder,
    "GPT in training, rate 0.003": lambda: trained(0.003, 10, tokens=SHORT),
    "GPT in training, rate 0.03": lambda: trained(0.03, 11, tokens=SHORT),
    "logit growth, weights 4 times": lambda: trained(
        0.005, 12, tokens=SHORT, times=4.0
    ),
    "logit growth, weights 12 times": lambda: trained(
        0.005, 13, tokens=SHORT, times=12.0
    ),
}


def shares_of_largest(logit_HQ: Tensor) -> tuple[Tensor, Tensor]:
    """Return what samples find, ÷ the largest logit of all rows.

    Of each head, (samples, heads), and of the largest head, (samples,).
    """
    queries = logit_HQ.shape[1]
    found = [
        logit_HQ[:, chosen_queries(queries, queries // 4, step=step, site="layer")]
        for step in range(SAMPLES)
    ]
    best_sH, true_H = torch.stack([x.amax(1) for x in found]), logit_HQ.amax(1)
    return best_sH[:, true_H > 0] / true_H[true_H > 0], best_sH.amax(1) / true_H.amax()


def logits() -> list[dict[str, object]]:
    """Return how far below the largest logit of all rows that of one in four lies."""
    rows = []
    for name, make in LOGITS.items():
        calls = make()
        pairs = [shares_of_largest(call.logit_HQ) for call in calls]
        heads = torch.cat([each.flatten() for each, _ in pairs])
        model = torch.cat([most for _, most in pairs])
        rows.append(
            {
                "logits": name,
                "largest": max(float(call.logit_HQ.max()) for call in calls),
                "head, median": float(heads.median()),
                "head, 5 %": float(heads.quantile(0.05)),
                "head, worst": float(heads.min()),
                "model, median": float(model.median()),
                "model, 5 %": float(model.quantile(0.05)),
                "model, worst": float(model.min()),
            }
        )
    return rows


def _readings(theta_HBn: Tensor, weight_n: Tensor) -> dict[str, Tensor]:
    flat_HN, weight_N = theta_HBn.flatten(1), weight_n.repeat(theta_HBn.shape[1])
    found = weighted_quantiles(flat_HN, weight_N, list(LEVELS.values()))
    mean = weighted_mean(flat_HN, weight_N)
    return {"mean": mean, **dict(zip(LEVELS, found, strict=True))}


def sampled(theta_HBQ: Tensor) -> dict[str, Tensor]:
    """Return, by reading, whether each sample's interval holds, of pairs that vary."""
    truth, weight_n = (
        _readings(theta_HBQ, torch.ones(QUERIES)),
        query_weights(QUERIES, ROWS),
    )
    held: dict[str, list[Tensor]] = {reading: [] for reading in truth}
    values: dict[str, list[Tensor]] = {reading: [] for reading in truth}
    for step in range(SAMPLES):
        chosen = chosen_queries(QUERIES, ROWS, step=step, site="layer")
        read = theta_HBQ[:, :, chosen]
        error = sampling_errors(read, weight_n, at=LEVELS)
        for reading, value_H in _readings(read, weight_n).items():
            off_H = (value_H - truth[reading]).abs()
            held[reading].append((off_H <= error[reading]).float())
            values[reading].append(value_H)
    vary = {key: torch.stack(x).std(0) > SAME for key, x in values.items()}
    return {key: torch.stack(x)[:, vary[key]] for key, x in held.items()}


def shares(name: str, held: dict[str, Tensor], pairs: int) -> dict[str, object]:
    """Return how many pairs vary, and the share of their intervals that hold."""
    row: dict[str, object] = {"θ": name, "pairs": pairs}
    for reading, held_sP in held.items():
        row[f"{reading} vary"] = held_sP.shape[1]
        row[reading] = float(held_sP.mean()) if held_sP.numel() else None
    return row


def coverage() -> list[dict[str, object]]:
    """Return the shares of each population, and of all pairs together."""
    rows, together, pairs = [], {}, 0
    for name, make in POPULATIONS.items():
        theta_HBQ = make()
        held = sampled(theta_HBQ)
        rows.append(shares(name, held, len(theta_HBQ)))
        pairs += len(theta_HBQ)
        for reading, held_sP in held.items():
            together.setdefault(reading, []).append(held_sP)
    all_held = {reading: torch.cat(x, 1) for reading, x in together.items()}
    return [*rows, shares("all", all_held, pairs)]


def _seconds(run: Callable[[], object]) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


def _call(length: int, heads: int = CALL_HEADS) -> AttentionCall:
    rng = torch.Generator().manual_seed(length)
    q, k = (torch.randn(1, heads, length, WIDTH, generator=rng) for _ in range(2))
    return AttentionCall(
        module=None,
        kind="sdpa",
        q_BHQD=q,
        k_BGKD=k,
        v_BGKD=k,
        causal=True,
        scale=WIDTH**-0.5,
    )


def _forward(call: AttentionCall) -> Tensor:
    assert call.q_BHQD is not None and call.k_BGKD is not None
    keys = (call.k_BGKD, call.k_BGKD)
    return F.scaled_dot_product_attention(call.q_BHQD, *keys, is_causal=True)


def _read(call: AttentionCall, rows: object) -> None:
    probe = AttentionRows(rows=rows)  # type: ignore[arg-type]
    probe.on_attention("site", call, lambda *_, **__: None)


def cost() -> dict[str, object]:
    """Return CPU seconds of a call's readings beside its own forward pass."""
    call = _call(LENGTH)
    runs: dict[str, Callable[[], object]] = {"forward s": lambda: _forward(call)}
    for rows in (ROWS, "all"):
        runs[f"rows={rows} s"] = lambda rows=rows: _read(call, rows)  # type: ignore[misc]
    for run in runs.values():
        run()
    rounds = [
        {name: _seconds(run) for name, run in runs.items()} for _ in range(REPEATS)
    ]
    middle = {name: _median([row[name] for row in rounds]) for name in runs}
    ratio = {
        f"× {name[:-2]}": _median([row[name] / row["forward s"] for row in rounds])
        for name in runs
    }
    return {"keys": LENGTH, **middle, **ratio}


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def main(parts: Sequence[str] = ()) -> None:
    if not parts or "coverage" in parts:
        publish("row_sample", coverage(), read=f"{ROWS} of {QUERIES}", bar="93 to 97 %")
    if not parts or "logits" in parts:
        read = f"{SHORT // 4} of {SHORT}"
        publish("row_sample_logits", logits(), read=read)
    if not parts or "cost" in parts:
        publish("row_sample_cost", [cost()], bar="0.5 × the forward pass")


if __name__ == "__main__":
    main(sys.argv[1:])
