"""What is read of one class, beside what its witnesses saw: a row of the table."""

import math
import re
import time
import traceback
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.discovery import anatomy_of
from equipoise.anatomy.mixers import mixers
from equipoise.anatomy.sites import Anatomy
from equipoise.probes.attention import rows_of_call
from equipoise.probes.capture import Boundary, PassCoverage, attached
from equipoise.probes.mixers import MixerGates
from equipoise.probes.router import RouterLoad
from equipoise.watching.step.coverage import unread_in_step
from equipoise.watching.step.layers import LayerCoverage
from tests.probes.reading import Emitter
from tests.zoo.constructed.subjects import DECODED, Batch, Subject
from tests.zoo.constructed.training import watched
from tests.zoo.constructed.witnesses import (
    Rows,
    Softmax,
    Witnessed,
    expert_tokens,
    rows,
    witnessed,
)
from tests.zoo.specimens import TOKENS

EXACT = 2e-6
"""How far a reading of a float64 model may be from the reference."""
LENGTHS = {TOKENS, DECODED}
UNSUPPORTED = re.compile("does not support|compatible with|not available for flash")
QUANTITIES = ("theta", "entropy", "max_logit")


@dataclass
class Reading:
    """What the interceptor and the probes said of one forward pass."""

    anatomy: Anatomy
    calls: dict[str, list[Rows]] = field(default_factory=dict)
    emitted: Emitter = field(default_factory=Emitter)
    coverage: PassCoverage = field(default_factory=PassCoverage)


@dataclass(frozen=True, slots=True)
class _Rows:
    """A probe that keeps each call's rows, as the attention probe reads them."""

    found: dict[str, list[Rows]]
    name: str = "rows"

    def on_attention(self, site: str, call: AttentionCall, emit: Any) -> None:
        read, (B, H, Q, _) = rows_of_call(call), call.shape
        shape = (H, B, Q)
        real = call.counted_BQ().expand(B, Q)
        counted = read.counted.view(shape).transpose(0, 1) & real[:, None]
        values = (
            getattr(read, name).view(shape).transpose(0, 1).double()
            for name in ("theta_lower", "entropy", "max_logit")
        )
        kept = (torch.where(counted, v, torch.nan) for v in values)
        self.found.setdefault(site.partition("#")[0], []).append(Rows(*kept, counted))


def read(model: nn.Module, batch: Batch) -> Reading:
    """Read one forward pass of a model."""
    found = Reading(anatomy_of(model))
    probes = [_Rows(found.calls), RouterLoad(), MixerGates()]
    with (
        torch.no_grad(),
        attached(
            probes,
            found.anatomy,
            found.emitted,
            boundary=Boundary(strict=True),
            coverage=found.coverage,
        ),
    ):
        model(**batch)
    return found


@contextmanager
def _by_default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def cast(given: Any, dtype: torch.dtype) -> Any:
    """Return a batch with its floating tensors in another format."""
    if isinstance(given, Tensor):
        return given.to(dtype) if given.is_floating_point() else given
    if isinstance(given, dict):
        return {name: cast(value, dtype) for name, value in given.items()}
    return (
        type(given)(cast(v, dtype) for v in given)
        if isinstance(given, tuple)
        else given
    )


def made(subject: Subject, implementation: str, dtype: torch.dtype) -> Any:
    """Return a model and its batch in a format."""
    model = subject.build(implementation).to(dtype)
    return model, cast(subject.batch(model), dtype)


def is_trained(name: str) -> bool:
    """Return whether a class is one of the eighth whose training is compared too.

    >>> is_trained("MixtralForCausalLM"), is_trained("LlamaForCausalLM")
    (True, False)
    """
    return zlib.crc32(name.encode()) % 8 == 0


def row_of(subject: Subject, *, train: bool = True) -> dict[str, Any]:
    """Return a class's row: what is read, how exactly, what is not, and why."""
    start = time.process_time()
    row: dict[str, Any] = {"class": subject.name, "kind": subject.kind}
    try:
        subject.batch(subject.build("eager"))
    except Exception as why:  # whatever a class wants that a configuration has not
        return row | {"status": "not built", "why": _in_short(why)}
    try:
        row |= examine(subject)
        row |= watched(subject) if train else {}
    except Exception as why:  # a row of a table says what went wrong
        return row | {"status": "failed", "why": _in_short(why)}
    row["seconds"] = round(time.process_time() - start, 1)
    return row | {"status": status(row)}


def _in_short(why: Exception) -> str:
    last = traceback.extract_tb(why.__traceback__)[-1]
    place = f"{Path(last.filename).name}:{last.lineno}"
    said = " ".join(str(why).split())[:160]
    return f"{type(why).__name__} at {place}: {said}"


def status(row: dict[str, Any]) -> str:
    """Return ``read`` where all of a class is read, else what it falls short of."""
    parts = [row[how] for how in ("eager", "sdpa") if how in row]
    far = [far for part in parts for far in part["worst"].values()]
    wrong = any(part["wrong"] for part in parts) or not all(f <= EXACT for f in far)
    routers = {said for said in row["routers"].values() if said != "equal"}
    if row.get("marks") or wrong or routers - {"unread"}:
        return "wrong"
    if any(part["silent"] for part in parts):
        return "silent"
    layers = all(read == of for _, _, read, of in row["layers"])
    unread = any(set(part["unread"]) - {""} or part["missed"] for part in parts)
    named = unread or row["partial"] or routers or not layers
    return "named" if named else "read"


def examine(subject: Subject) -> dict[str, Any]:
    """Return the readings of one forward pass beside what its witnesses saw."""
    dtype = torch.float64
    try:
        truth = _witnessed(subject, dtype)
    except RuntimeError:  # a few classes hold constants that are no float64
        dtype = torch.float32
        truth = _witnessed(subject, dtype)
    row: dict[str, Any] = {"format": str(dtype).removeprefix("torch.")}
    for implementation in ("eager", "sdpa"):
        with _by_default(dtype):
            try:
                model, batch = made(subject, implementation, dtype)
                found = read(model, batch)
            except (ValueError, AssertionError) as why:
                if implementation == "eager" or not UNSUPPORTED.search(str(why)):
                    raise
                continue
            row |= compared(model, found, truth, implementation, batch)
    return row


def _witnessed(subject: Subject, dtype: torch.dtype) -> Witnessed:
    with _by_default(dtype):
        model, batch = made(subject, "eager", dtype)
        return witnessed(model, batch, lengths=LENGTHS)


def compared(
    model: nn.Module, found: Reading, truth: Witnessed, how: str, batch: Batch
) -> dict[str, Any]:
    """Return one implementation's reading beside its witnesses."""
    real = batch.get("attention_mask")
    real = real.bool() if isinstance(real, Tensor) and real.ndim == 2 else None
    modules = dict(model.named_modules())
    softmaxes = truth.softmaxes if how == "eager" else truth.wide
    attention = [s for s in softmaxes if _attends(modules, s)]
    result = agreement(attention, found.calls, real, modules)
    layers = LayerCoverage().add(found.anatomy, found.coverage, _gated(found))
    unread = unread_in_step(
        found.anatomy, found.coverage.ran, found.coverage.read, found.coverage.gaps
    )
    unread |= found.coverage.gaps.unread
    unread = {n: why for n, why in unread.items() if n not in found.coverage.read}
    sure = mixers(found.anatomy, found.coverage.read)
    known = {*found.calls, *unread, *sure, *found.coverage.gaps.partial} - {""}
    mixing = [*truth.mixing, *(s.site for s in attention)]
    silent = sorted({m for m in mixing if not any(_touch(m, k) for k in known)})
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        how: {
            "softmaxes": len(attention),
            "read": sum(map(len, found.calls.values())),
            **result,
            "unread": {n: w.code for n, w in unread.items()},
            "silent": silent,
        },
        "layers": [[o["kind"], o["class"], o["read"], o["of"]] for o in layers],
        "routers": _routers(found, expert_tokens(model, batch)),
        "mixers": {n: _kind(found.anatomy, n) for n in sure},
        "partial": {
            n: [w.code for w in why]
            for part in (found.coverage.gaps.partial, found.emitted.reasons)
            for n, why in part.items()
        },
        "blocks": len(found.anatomy.blocks),
        "norms": len(found.anatomy.norms),
        "projections": _projections(found),
        "others": sorted(
            {
                f"{type(modules[s.site]).__name__} {tuple(s.scores.shape)}"
                for s in softmaxes
                if not _attends(modules, s)
            }
        ),
    }


OTHERS = re.compile(r"(router|gate|gating|indexer|experts?|moe|mlp)$", re.IGNORECASE)


def _attends(modules: dict[str, nn.Module], softmax: Softmax) -> bool:
    """Return whether a softmax is attention: by its module's name, or by its axes.

    One query is a filter over neighbours, which some modules have beside attention.
    """
    name, shape = type(modules[softmax.site]).__name__, softmax.scores.shape
    if OTHERS.search(name) or len(shape) < 3 or shape[-2] == 1:
        return False
    return "att" in name.lower() or {*shape[-2:]} <= LENGTHS


def _touch(a: str, b: str) -> bool:
    a, b = f"{a}.", f"{b.partition('#')[0]}."
    return a.startswith(b) or b.startswith(a)


def agreement(
    attention: list[Softmax],
    calls: dict[str, list[Rows]],
    real: Tensor | None,
    modules: dict[str, nn.Module],
) -> dict[str, Any]:
    """Return the largest differences, the rows left out, and what does not match."""
    worst = dict.fromkeys(QUANTITIES, 0.0)
    wrong, missed, left_out = list[str](), list[str](), 0
    by_site: dict[str, list[Softmax]] = {name: [] for name in calls}
    for softmax in attention:
        site = next((n for n in calls if f"{softmax.site}.".startswith(f"{n}.")), None)
        if site is None:
            missed.append(softmax.site)
        else:
            by_site[site].append(softmax)
    for site, seen in by_site.items():
        if len(seen) != len(calls[site]):
            wrong.append(f"{site}: {len(calls[site])} calls of {len(seen)}")
            continue
        sinks = getattr(modules[site], "sinks", None)
        truths = [rows(s.scores, sinks=sinks, real=real) for s in seen]
        # Read when they mix values: one module's calls may come in another order.
        for truth, call in zip(*map(_by_size, (truths, calls[site])), strict=True):
            far = difference(truth, call)
            if far is None:
                shapes = tuple(truth.counted.shape), tuple(call.counted.shape)
                wrong.append(f"{site}: rows {shapes}")
                continue
            worst = {q: _larger(worst[q], far[q]) for q in QUANTITIES}
            left_out += int(truth.counted.sum() - call.counted.sum())
    return {
        "worst": worst,
        "wrong": wrong,
        "missed": sorted(set(missed)),
        "rows left out": left_out,
    }


def _by_size(found: list[Rows]) -> list[Rows]:
    return sorted(found, key=lambda r: (r.counted.shape[-1], r.counted.numel()))


def _larger(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def difference(truth: Rows, call: Rows) -> dict[str, float] | None:
    """Return how far a call's rows are from the truth; None where they do not match.

    A call may leave rows out; of a layout that is no (B, H, Q) all rows are compared,
    in order of size. Logits above 1 are compared by their own size.
    """
    known = _laid_out(truth, call)
    if known is not None and bool((known.counted | ~call.counted).all()):
        pairs = [(getattr(known, q), getattr(call, q)) for q in QUANTITIES]
        pairs = [(a[call.counted], b[call.counted]) for a, b in pairs]
    elif truth.counted.sum() == call.counted.sum():
        pairs = [(getattr(truth, q), getattr(call, q)) for q in QUANTITIES]
        pairs = [(_sorted(a), _sorted(b)) for a, b in pairs]
    else:
        return None
    far = (_far(a, b) if a.numel() else 0.0 for a, b in pairs)
    return dict(zip(QUANTITIES, far, strict=True))


def _far(truth: Tensor, read: Tensor) -> float:
    far = (truth - read).abs() / truth.abs().clamp(min=1.0)
    both = truth.isnan() & read.isnan()  # a model that makes NaN, as one of them does
    return float(far.masked_fill(both, 0.0).max())


def _sorted(x: Tensor) -> Tensor:
    return x[~x.isnan()].flatten().sort().values


def _laid_out(truth: Rows, call: Rows) -> Rows | None:
    """Return the truth's rows as (B, H, Q), if its axes are those in some order."""
    B, H, Q = call.counted.shape
    names = (*QUANTITIES, "counted")
    if truth.counted.numel() != B * H * Q:
        return None
    if truth.counted.shape == (B, Q, H) and H != Q:
        return Rows(*(getattr(truth, n).transpose(1, 2) for n in names))
    return Rows(*(getattr(truth, n).reshape(B, H, Q) for n in names))


def _routers(found: Reading, experts: dict[str, dict[int, int]]) -> dict[str, str]:
    """Return for each router whether its load is the count of the forward pass."""
    result: dict[str, str] = {}
    seen: set[str] = set()
    names = found.anatomy.names
    for site, router in found.anatomy.routers.items():
        homes = [n for m in router.experts if (n := names.get(id(m)))]
        homes += [names[id(router.home)]]
        mine = [n for home in homes for n in experts if _touch(n, home)]
        seen |= set(mine)
        load = found.emitted.found.get((site, "router.load"))
        tokens = found.emitted.found.get((site, "router.tokens"))
        counts = experts[mine[0]] if mine else None
        result[site] = _equal(load, tokens, counts)
    return result | {home: "no router" for home in experts if home not in seen}


def _equal(
    load: Tensor | None, tokens: Tensor | None, counts: dict[int, int] | None
) -> str:
    """Compare the experts that hold weights; a router may also choose none of them."""
    if load is None or tokens is None:
        return "unread"
    if counts is None:
        return "no witness"
    read_E = (load.double() * tokens.double()).round()
    count_E = [float(counts.get(e, 0)) for e in range(max(counts) + 1)]
    same = read_E[: len(count_E)].tolist() == count_E
    return "equal" if same else f"{read_E.tolist()} against {count_E}"


def _kind(anatomy: Anatomy, name: str) -> str:
    return anatomy.mixers[name].kind if name in anatomy.mixers else ""


def _gated(found: Reading) -> set[str]:
    return {s for s, q in found.emitted.found if q.startswith("mixer.")}


def _projections(found: Reading) -> str:
    sites = {s.name: s for s in found.anatomy.attention}
    known = [sites[n] for n in found.calls if n in sites and sites[n].projections]
    if len(known) < len(found.calls):
        return f"{len(known)} of {len(found.calls)}"
    return "declared" if all(s.declared for s in known) else "guessed"
