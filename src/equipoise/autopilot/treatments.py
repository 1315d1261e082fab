"""Which treatment fits the evidence: remedies with options, and how far to go back.

A treatment is chosen by the rules that fire now, by the optimiser's own settings and by
the rate's own course; the first that fits and has not failed in this run is tried.
The order is that of invasiveness: settings that are plainly wrong, then what leaves
the rate alone, then the rate.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from equipoise.judging.history import Curve
from equipoise.judging.judge import Judge
from equipoise.records import Scalar
from equipoise.text.verdict_text import worded

GROWN = 1.2
"""A learning rate that is so much higher than forty steps ago is growing."""
LARGE_EPSILON, LOW_BETA2 = 1e-5, 0.9
"""Adam's ε is 1e-8 and its β₂ 0.95 to 0.999 in what is published."""

NOT_BY_RATE = frozenset(
    "gradient.qk_starved update.too_small norm.epsilon_rules precision.error "
    "residual.outliers ranks.disagree".split()
)
"""Rules about a model that is not going too fast: alone they are no reason to slow it.
A small model on data without structure starves its queries and keys, and is healthy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreatmentEvidence:
    """What is known when an alarm is raised; the same on every rank."""

    step: int
    since: Mapping[str, int]
    """Rule about the model that fires → the step from which it is true."""
    start: int = 0
    """The first step that was read."""
    epsilon: float = 1e-8
    beta2: float = 0.999
    """Of the optimiser; these where it has none."""
    rate_grew: bool = False
    """Whether the learning rate is higher than forty steps ago."""
    sentence: str = ""
    nonfinite: bool = False

    @property
    def began(self) -> int:
        """The first step at which anything was wrong."""
        return min(self.since.values(), default=self.step)

    def fires(self, *rules: str) -> bool:
        return any(rule in self.since for rule in rules)

    def fires_from_start(self, *rules: str) -> bool:
        """Return whether one was true before anything was learned."""
        return any(self.since.get(rule, self.step) <= self.start for rule in rules)


def evidence_of(judge: Judge, optimizer: Optimizer) -> TreatmentEvidence | None:
    """Return the evidence for an alarm, or None while there is nothing to treat.

    A rule about the loss alone is no evidence of a cause: new data and a slow run look
    the same. A loss that is not finite is.
    """
    about = {one.rule.name: one.rule.about for one in judge.at_work}
    firing = [f for f in judge.firing if f.severity != "info"]
    model = [f for f in firing if about.get(f.code) == "model"]
    verdict = worded(judge.verdict)
    nonfinite = [f for f in verdict.findings if f.belongs_to("nonfinite")]
    if not model and not nonfinite:
        return None
    losses = judge.history.track("loss").first
    return TreatmentEvidence(
        step=judge.history.step,
        since={f.code: f.since for f in [*model, *nonfinite]},
        start=losses[0].step if losses else 0,
        rate_grew=_rate_grew(judge.history.curve("learning_rate")),
        sentence=verdict.sentence,
        nonfinite=bool(nonfinite),
        **_settings(optimizer),
    )


def _rate_grew(curve: Curve) -> bool:
    latest = curve.tail(40)
    return len(latest) == 40 and latest[-1] > GROWN * latest[0]


def _settings(optimizer: Optimizer) -> dict[str, float]:
    groups = [g for g in optimizer.param_groups if "betas" in g and "eps" in g]
    if not groups:
        return {}
    return {
        "epsilon": max(float(g["eps"]) for g in groups),
        "beta2": min(float(g["betas"][1]) for g in groups),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """Remedies that are applied together."""

    name: str
    remedies: Mapping[str, Mapping[str, Any]]
    fits: Callable[[TreatmentEvidence], bool] = field(compare=False)
    margin: int = 20
    """Go back to before the trouble by this many steps."""
    until_usual: bool = False
    """Withdrawn as soon as the loss of new batches is what it was before."""
    again: bool = False
    """May be applied a second time while it is active."""

    @property
    def options(self) -> dict[str, dict[str, Scalar]]:
        return {name: dict(given) for name, given in self.remedies.items()}


def _adam_settings(e: TreatmentEvidence) -> bool:
    return e.epsilon > LARGE_EPSILON or e.beta2 < LOW_BETA2


def _experts(e: TreatmentEvidence) -> bool:
    return e.fires("router.collapsed", "router.certain")


def _bad_batches(e: TreatmentEvidence) -> bool:
    # A model that is blown up by its rate has spikes too.
    blown_up = "update.too_large", "residual.growing", "attention.logits_growing"
    return e.fires("gradient.spike") and not e.fires(*blown_up)


def _large_weights(e: TreatmentEvidence) -> bool:
    large = "residual.embedding_large", "attention.saturated", "attention.logits_large"
    return e.fires_from_start(*large)


def _rounded(e: TreatmentEvidence) -> bool:
    return e.fires("update.lost")


def _growing_weights(e: TreatmentEvidence) -> bool:
    too_fast = e.rate_grew or e.fires("update.too_large")
    return e.fires("residual.growing") and not too_fast


def _vanished(e: TreatmentEvidence) -> bool:
    return e.fires("gradient.vanished")


def _rate(e: TreatmentEvidence) -> bool:
    return not NOT_BY_RATE.issuperset(e.since)


TREATMENTS: Sequence[Treatment] = (
    Treatment(
        name="usual Adam settings",
        remedies={"beta2": {"beta2": 0.95, "epsilon": 1e-8}},
        fits=_adam_settings,
    ),
    Treatment(
        name="balance the experts",
        remedies={"router_balance": {"balance": 0.01, "guard": True}},
        fits=_experts,
    ),
    Treatment(
        name="leave out bad batches",
        remedies={"skip_step": {"always": True}},
        fits=_bad_batches,
        margin=0,
        until_usual=True,
    ),
    Treatment(
        name="exact weights",
        remedies={"master_weights": {}},
        fits=_rounded,
    ),
    Treatment(
        name="smaller weights",
        remedies={"weight_cap": {"gain": 0.7, "lasts": False}},
        fits=_large_weights,
    ),
    Treatment(
        name="hold the weights' norms",
        remedies={"weight_cap": {"times": 2.0}},
        fits=_growing_weights,
    ),
    Treatment(
        name="a quarter of the rate",
        remedies={"learning_rate": {"scale": 0.25, "warmup": 20}},
        fits=_vanished,
    ),
    Treatment(
        name="a tenth of the rate",
        remedies={"learning_rate": {"scale": 0.1, "warmup": 20}},
        fits=_rate,
        again=True,
    ),
)
"""In the order in which they are tried."""
BY_NAME = {treatment.name: treatment for treatment in TREATMENTS}


def candidates(
    evidence: TreatmentEvidence,
    *,
    failed: Collection[str] = (),
    active: Collection[str] = (),
) -> Iterator[Treatment]:
    """Yield the treatments that fit, have not failed, and would change something."""
    for treatment in TREATMENTS:
        changes = treatment.again or treatment.name not in active
        if treatment.name not in failed and changes and treatment.fits(evidence):
            yield treatment


WINDOW = 8
"""Losses that make a level."""


def level(curve: Curve, step: int) -> float:
    """Return the loss just before a step: the mean of eight, of fewer at the start.

    >>> curve = Curve()
    >>> for step in range(20): curve.add(step, float(step))
    >>> level(curve, 10), level(curve, 0)
    (5.5, 0.0)
    """
    if curve.steps and curve.steps[0] > step:  # long ago: only means are kept
        means = [mean for first, mean in curve.blocks if first <= step]
        return means[-1] if means else math.nan
    pairs = list(zip(curve.steps, curve.values, strict=True))
    before = [value for at, value in pairs if at < step][-WINDOW:]
    found = before or curve.values[:1]
    return sum(found) / len(found) if found else math.nan
