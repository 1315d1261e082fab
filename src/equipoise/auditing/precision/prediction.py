"""The error that low precision will make, from one forward and one backward pass.

To first order the output moves by Σ (∂Y/∂x)·r(x) over every stored number x, with r(x)
its rounding residual. Residuals are as good as independent, so the mean square is
Σ r(x)²‖∂Y/∂x‖²; and for a random output probe ξ with unit variances,
E(∂⟨ξ,Y⟩/∂x)² = ‖∂Y/∂x‖². So one backward pass of ⟨ξ,Y⟩ carries every module's residuals
to the output at once, and a module's share is Σ r²g² over what it stores.

An output of many features (a vocabulary) is probed at some of them, drawn at random and
weighted up: unbiased. Where the output is the head's product, nothing else of it is
made, and ‖Y‖ is estimated from the same features.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from equipoise.auditing.precision.emulation import Storage
from equipoise.auditing.precision.error_terms import ErrorTerm, ErrorTerms
from equipoise.auditing.precision.lazy_product import LazyProduct
from equipoise.auditing.precision.walk import walked
from equipoise.auditing.subject import Batch, output_of
from equipoise.errors import InputError

WORDS = 2048
ROWS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted relative error of the output, by module and by what is stored there."""

    variance: dict[str, dict[str, float]]
    """Per module and kind: E‖ΔY‖²/‖Y‖²."""
    heads: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Per attention module and head: the part of it made inside the head, by rounding
    scores, probabilities and their product with the values."""
    sampling_error: float = 0.0
    """Relative standard error of ``total`` from reading some rows, weight columns and
    words only; how much one probe differs from another comes on top."""

    @property
    def by_module(self) -> dict[str, float]:
        """Return the predicted relative error with only that module narrow."""
        return {s: math.sqrt(sum(k.values())) for s, k in self.variance.items()}

    @property
    def total(self) -> float:
        """Return the predicted relative error with every module narrow."""
        return math.sqrt(sum(sum(k.values()) for k in self.variance.values()))

    @property
    def shares(self) -> dict[str, float]:
        """Return each module's share of the predicted mean square error.

        Modules that leave the range have all of it, in equal parts.
        """
        size = {s: sum(k.values()) for s, k in self.variance.items()}
        if not math.isfinite(self.total):
            size = {s: float(not math.isfinite(x)) for s, x in size.items()}
        total = sum(size.values()) or 1.0
        return {s: x / total for s, x in size.items()}

    def dominant(self, site: str) -> str:
        """Return what contributes most at a module: weight, score, prob, product, …"""
        return max(self.variance[site], key=self.variance[site].__getitem__)


def predicted(
    model: nn.Module,
    batch: Batch,
    *,
    storage: Storage,
    probes: int = 1,
    seed: int = 0,
    rows: int | None = ROWS,
    words: int | None = WORDS,
) -> Prediction:
    """Return the predicted error of the model's output on a batch, module by module.

    Args:
        model: run as it is, in its own dtype (float32 or float64), in eval mode.
        batch: what to call it on.
        storage: the format every module would store its numbers in.
        probes: random output probes; one backward pass each.
        seed: of the probes and of what is sampled.
        rows: how many rows (tokens, queries) of each tensor to read; None for all.
        words: output features a probe looks at, of twice as many or more; None for all.

    First order, residuals independent, no overflow: read it with the range table.
    """
    _check(probes, rows, words)
    rng = torch.Generator().manual_seed(seed)
    carriage = ErrorTerms(storage, rng, rows)
    y = _followed(model, batch, carriage)
    views = _views(y, rng, probes=probes, words=words)
    size, spread = _size(y, views)
    if not (math.isfinite(size) and size > 0):
        raise InputError(
            f"the model's output has norm {size}: nothing to be relative to"
        )
    for view in views:
        # Divided by ‖Y‖ here: squares of raw gradients may leave float32's range.
        larger = math.sqrt(y.numel() / view.numel()) / size
        torch.autograd.backward(
            view, _signs(view, rng) * larger, retain_graph=probes > 1
        )
    return _prediction(carriage, probes, spread)


def _check(probes: int, rows: int | None, words: int | None) -> None:
    few = [n for n in (rows, words) if n is not None and n < 2]
    if probes < 1 or few:
        raise InputError(
            "predicted needs at least one probe, two rows and two words, got "
            f"{probes}, {rows} and {words}"
        )


def _followed(model: nn.Module, batch: Batch, carriage: ErrorTerms) -> Tensor:
    """Return the model's output, its history seen by the carriage."""
    training = model.training
    try:
        model.eval()
        with torch.enable_grad(), walked(model, carriage):
            return output_of(model, batch)
    finally:
        model.train(training)


def _views(
    y: Tensor, rng: torch.Generator, *, probes: int, words: int | None
) -> list[Tensor]:
    """Return what each probe looks at: the output, or some features drawn for it."""
    M = y.shape[-1] if y.dim() else 1
    if words is None or M <= 2 * words:
        return [y.full if isinstance(y, LazyProduct) else y] * probes
    chosen = [torch.randperm(M, generator=rng)[:words] for _ in range(probes)]
    if isinstance(y, LazyProduct) and not y.is_made:
        return [y.some(m.to(y.device)) for m in chosen]
    return [y.index_select(-1, m.to(y.device)) for m in chosen]


def _size(y: Tensor, views: list[Tensor]) -> tuple[float, float]:
    """Return ‖Y‖, and the relative standard error it was estimated with."""
    if not isinstance(y, LazyProduct) or y.is_made:
        return _norm(y.detach()), 0.0
    squares_m = torch.cat([v.detach().flatten(0, -2).square().sum(0) for v in views])
    mean, n, M = float(squares_m.double().mean()), len(squares_m), y.shape[-1]
    left = max(0.0, 1 - n / M)
    return math.sqrt(mean * M), float(squares_m.std()) / mean * math.sqrt(left / n) / 2


def _norm(y: Tensor) -> float:
    # Row by row: a float64 copy of all logits takes a tenth of a forward pass.
    norms = torch.linalg.vector_norm(y, dim=-1) if y.dim() else y
    return float(norms.double().norm())


def _signs(like: Tensor, rng: torch.Generator) -> Tensor:
    return torch.randint(0, 2, like.shape, generator=rng).to(like) * 2 - 1


def _prediction(carriage: ErrorTerms, probes: int, spread: float) -> Prediction:
    noted = [
        (site, kind, note)
        for site, kinds in carriage.sums.items()
        for kind, notes in kinds.items()
        for note in notes
    ]
    variance: dict[str, dict[str, float]] = {s: {} for s in carriage.sums}
    heads: dict[str, Tensor] = {}
    for site, kind, note in noted:
        variance[site][kind] = variance[site].get(kind, 0.0) + note.total / probes
        if note.by_head is not None:
            heads[site] = heads.get(site, 0.0) + note.by_head / probes
    return Prediction(
        variance=variance,
        heads={site: tuple(found.tolist()) for site, found in heads.items()},
        sampling_error=math.hypot(spread, _relative_error(n for *_, n in noted)),
    )


def _relative_error(found: Iterable[ErrorTerm]) -> float:
    """Return the relative standard error of √Σ: half that of Σ."""
    notes = list(found)
    total = sum(note.total for note in notes)
    spread = math.sqrt(sum(note.variance for note in notes))
    return spread / total / 2 if total else 0.0
