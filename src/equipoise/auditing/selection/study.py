"""Every head of a model on one batch: does it select, and does length wear it out?

Axes, in this file:  B batch · H head · q sampled queries · K key · N row of a head.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.discovery import anatomy_of
from equipoise.auditing.subject import Batch, output_of
from equipoise.errors import InputError
from equipoise.numerics.selection import AtSizes, concentration, range_needed
from equipoise.probes.capture import Boundary, Collector, attached
from equipoise.probes.protocols import Emit
from equipoise.probes.selection import (
    against_chance,
    mean_by_head,
    sampled_scores,
    softmax_of,
    spread,
)
from equipoise.records import html_table

# More than half of the mass on the first key; more than half of the keys in effect.
SINK, FLAT = 0.5, 0.5
# Effective keys grow faster than √n: at ten times the length, more than three times.
SPREADS = 0.5
# Fewer visible keys say little about growth, and nothing when all rows see as many.
FEWEST, NARROWEST = 8, 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionRow:
    """One head, means over sampled queries; NaN where there was nothing to read."""

    site: str
    head: int
    rho: float
    """Range of the logits."""
    evenness: float
    """Effective keys e^H over visible keys; 1 is flat."""
    growth: float
    """b in e^H ~ n^b over queries that see different numbers of keys."""
    sink: float
    """Mass on the first key."""
    lift: float
    """d̃ of the heaviest tokens over that of random ones, from below."""
    recall: float
    recall_random: float

    @property
    def verdict(self) -> str:
        """``sink``, ``flat``, ``spreads`` or ``selects``; ``unread`` without a row."""
        if math.isnan(self.evenness):
            return "unread"
        if self.sink > SINK:
            return "sink"
        if self.evenness > FLAT:
            return "flat"
        return "spreads" if self.growth > SPREADS else "selects"


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionStudy:
    """What was read, and at which length."""

    model: str
    rows: list[SelectionRow]
    keys: int
    """Most keys any query saw."""
    chosen: int
    """Tokens chosen for lift and recall, in the longest call."""

    def __repr__(self) -> str:
        counts = ", ".join(f"{n} {kind}" for kind, n in self.counts.items())
        return f"SelectionStudy({self.model}, {self.keys} keys: {counts})"

    def _repr_html_(self) -> str:
        head = ("head", "verdict", "range of logits", "evenness", "sink")
        rows = [
            (
                f"{r.site} {r.head}",
                r.verdict,
                *(f"{x:.3g}" for x in (r.rho, r.evenness, r.sink)),
            )
            for r in self.rows
        ]
        return html_table(repr(self), [head, *rows])

    @property
    def counts(self) -> dict[str, int]:
        """How many heads got each verdict."""
        kinds = ("selects", "spreads", "flat", "sink", "unread")
        found = [row.verdict for row in self.rows]
        return {kind: found.count(kind) for kind in kinds if kind in found}

    @property
    def needed(self) -> float:
        """The range of logits one of the keys needs for half of the mass."""
        return range_needed(self.keys, 0.5)


def study(
    model: nn.Module, batch: Batch, *, queries: int = 64, top: int = 16
) -> SelectionStudy:
    """Return how every head of a model selects on a batch.

    Args:
        model: Anything that calls attention; it is put into eval mode meanwhile.
        batch: What the model takes.
        queries: How many evenly spaced queries of each sequence to look at.
        top: Tokens chosen for lift and recall, or an eighth of the keys if less.
    """
    if queries < 1 or top < 1:
        raise InputError(f"queries {queries}, top {top}: both must be at least 1")
    listener = _Listener(queries=queries, top=top)
    training = model.training
    model.eval()
    try:
        boundary = Boundary(strict=True)
        with attached([listener], anatomy_of(model), Collector(), boundary=boundary):
            with torch.no_grad():
                output_of(model, batch)
    finally:
        model.train(training)
    if not listener.rows:
        raise InputError(f"{type(model).__name__} called no attention on this batch")
    return SelectionStudy(
        model=type(model).__name__,
        rows=listener.rows,
        keys=listener.keys,
        chosen=listener.chosen,
    )


def _first_mass(w_BHqK: Tensor, call: AttentionCall, at: list[int]) -> Tensor:
    """Return each row's mass on the first key of its sequence."""
    first_BQ = call.first_key_BQ()
    if first_BQ is None:
        return w_BHqK[..., 0]
    at_BHq1 = (
        first_BQ[:, at]
        .clamp(max=w_BHqK.shape[-1] - 1)[:, None, :, None]
        .expand(*w_BHqK.shape[:3], 1)
    )
    return w_BHqK.gather(-1, at_BHq1)[..., 0]


@dataclass(slots=True)
class _Listener:
    """Turns each attention call into rows; emits nothing."""

    queries: int
    top: int
    name: str = "selection study"
    rows: list[SelectionRow] = field(default_factory=list)
    keys: int = 0
    chosen: int = 0

    def on_attention(self, site: str, call: AttentionCall, emit: Emit) -> None:
        at = spread(call.shape[2], self.queries)
        z_BHqK = sampled_scores(call, at)
        w_BHqK = softmax_of(z_BHqK)
        seen = concentration(z_BHqK, weights=w_BHqK)
        counted = call.counted_BQ()[:, None, at] & (seen.visible > 1)
        columns = {
            "rho": seen.rho,
            "evenness": seen.evenness,
            "sink": _first_mass(w_BHqK, call, at),
            **self._chance(w_BHqK, z_BHqK, call),
        }
        means = {name: mean_by_head(value, counted) for name, value in columns.items()}
        means["growth"] = _growth(seen.entropy, seen.visible, counted)
        self.keys = max(self.keys, int(seen.visible.max()))
        for head in range(z_BHqK.shape[1]):
            read = {name: float(mean_H[head]) for name, mean_H in means.items()}
            self.rows.append(SelectionRow(site=site, head=head, **read))

    def _chance(
        self, w_BHqK: Tensor, z_BHqK: Tensor, call: AttentionCall
    ) -> dict[str, Tensor]:
        """Return lift and recall; NaN where the values were not seen."""
        names = ("lift", "recall", "recall_random")
        if call.v_BGKD is None:
            nothing = torch.full(w_BHqK.shape[:3], math.nan)
            return dict.fromkeys(names, nothing)
        found: AtSizes = against_chance(w_BHqK, z_BHqK, call.v_BGKD, most=self.top)
        self.chosen = max(self.chosen, max(1, min(self.top, w_BHqK.shape[-1] // 8)))
        assert found.distance is not None and found.euclidean is not None
        assert found.random_euclidean is not None
        values = (
            found.distance.lift_lower,
            found.euclidean.recall,
            found.random_euclidean.recall,
        )
        return {n: v[..., 0] for n, v in zip(names, values, strict=True)}


def _growth(entropy_BHq: Tensor, visible_BHq: Tensor, counted_BHq: Tensor) -> Tensor:
    """Return the slope of H over ln n per head, by least squares over its rows.

    NaN where all rows see about as many keys: a model that is not causal.
    """
    use_HN = (counted_BHq & (visible_BHq >= FEWEST)).transpose(0, 1).flatten(1)
    x_HN = visible_BHq.transpose(0, 1).flatten(1).clamp_min(1).log()
    y_HN = entropy_BHq.transpose(0, 1).flatten(1)
    n_H1 = use_HN.sum(-1, keepdim=True)
    x_HN = (x_HN - (x_HN * use_HN).sum(-1, keepdim=True) / n_H1) * use_HN
    spread_H = (x_HN.square().sum(-1) / n_H1[:, 0]).sqrt()
    slope_H = (x_HN * y_HN).sum(-1) / x_HN.square().sum(-1)
    return slope_H.masked_fill(~(spread_H > NARROWEST), math.nan)
