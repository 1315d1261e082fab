"""Rules over the first steps of a run: is it set up so that it can train?

They read what a pre-flight recorded in about twenty steps, and the schedule's peak
learning rate: most starts look fine until the warm-up has ended.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from equipoise.judging.history import joined, judged
from equipoise.judging.remedy_catalogue import advise
from equipoise.records import Finding, Reading, Scalar

STEPS = 20
LARGEST_UPDATE = 0.06
"""‖Δw‖/‖w‖ of a block in one step at the peak. Storms, small tier, all but the held-out
families: below 0.06 in all but one run that survives, 0.09 and more where the rate
is fatal."""
LOGITS = 50.0
"""Largest attention logit; 20 at most in storms' survivors, 1e3 hurts (2309.14322)."""
SATURATED = 0.5
"""Share of heads whose median row has θ < 0.5."""
GRADIENTS = (0.1, 100.0)
"""Gradient norm of the first block over the last one's: 0.9 to 8.5 in survivors."""
GROWTH = 100.0
"""Size of the residual stream after the last block over after the first."""
FIRST_LOSS = 1.5
"""First loss over that of equal probabilities; 1.04 in storms' survivors."""
ADAM = 10.0
"""√v̂ of a block over Adam's ε; at 1 the update is halved (2309.14322, §3.4)."""
NOTHING = 1e-9
"""Relative update that moves nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first steps of a run, and what its set-up says."""

    readings: Sequence[Reading]
    peak_lr: float = math.nan
    """The largest learning rate of the schedule; NaN where it is not known."""
    classes: int = 0
    """Over how many classes the loss is taken; 0 where it is not known."""
    roundoff: float = 0.0
    """Unit round-off of the weights' own format, where they have no wider copy."""
    by_step: Mapping[str, Mapping[int, Reading]] = field(init=False)

    def __post_init__(self) -> None:
        found: dict[str, dict[int, Reading]] = {}
        for reading in map(judged, self.readings):
            if reading.step <= STEPS:
                known = found.setdefault(reading.quantity, {})
                earlier = known.get(reading.step, reading)
                known[reading.step] = joined(earlier, reading)
        object.__setattr__(self, "by_step", found)

    def values(self, quantity: str) -> Iterator[tuple[int, str, float]]:
        """Yield step, site and value of every finite number of a quantity."""
        for step, reading in self.by_step.get(quantity, {}).items():
            for site, row in zip(reading.sites, reading.values, strict=True):
                yield from ((step, site, v) for v in row if math.isfinite(v))

    def scalar(self, quantity: str, step: int) -> float:
        reading = self.by_step.get(quantity, {}).get(step)
        return reading.values[0][0] if reading else math.nan


def start_findings(start: Start) -> list[Finding]:
    """Return what is wrong with the start of a run, in the order of the rules."""
    return [finding for rule in RULES for finding in rule(start)]


def _finding(
    rule: str, site: str, message: str, *, advice: str, **evidence: Scalar
) -> Finding:
    return Finding.warn(0, rule, message, site=site, advice=advice, **evidence)


def updates_at_peak(start: Start) -> dict[str, float]:
    """Return each block's largest relative update, put on the scale of the peak rate.

    The first step is left out: Adam's first update is as large as the rate allows.
    """
    found: dict[str, float] = {}
    for step, site, ratio in start.values("update.ratio"):
        rate = start.scalar("learning_rate", step)
        scale = start.peak_lr / rate if rate > 0 and start.peak_lr > rate else 1.0
        if step > 0:
            found[site] = max(found.get(site, 0.0), ratio * scale)
    return found


def largest_stable_rate(start: Start) -> float:
    """Return the rate at which the largest update is just within the limit."""
    updates = updates_at_peak(start)
    worst = max(updates.values(), default=0.0)
    return start.peak_lr * LARGEST_UPDATE / worst if worst > 0 else math.nan


def _rate(start: Start) -> Iterator[Finding]:
    updates = updates_at_peak(start)
    site = max(updates, key=updates.__getitem__, default="")
    if updates and updates[site] > LARGEST_UPDATE:
        most = largest_stable_rate(start)
        yield _finding(
            "start.learning_rate",
            site,
            f"at the schedule's peak a step moves {site or 'the model'} by "
            f"{updates[site]:.1%} of its weights; the largest stable learning rate is "
            f"about {most:.2g}" + _given(start),
            advice=_lower(most),
            update=updates[site],
            largest_stable=most,
            peak=start.peak_lr,
        )


def _lower(most: float) -> str:
    if math.isnan(most):
        return advise(["learning_rate"])
    return f"let the schedule's peak be {most:.2g} or less (remedy learning_rate)"


def _given(start: Start) -> str:
    return "" if math.isnan(start.peak_lr) else f", the peak is {start.peak_lr:.2g}"


def _sharpness(start: Start) -> Iterator[Finding]:
    """SGD's rate against curvature; Adam's preconditioner is no guide so early."""
    if "update.norm" in start.by_step:
        return
    for step, site, ratio in start.values("curvature.edge_ratio"):
        rate = start.scalar("learning_rate", step)
        scale = start.peak_lr / rate if rate > 0 and start.peak_lr > rate else 1.0
        if step > 0 and ratio * scale > 2:
            yield _finding(
                "start.learning_rate",
                site,
                f"the loss is {ratio * scale:.3g} times sharper than the peak learning "
                f"rate allows; the largest stable one is about {rate / ratio:.2g}",
                advice=_lower(rate / ratio),
                ratio=ratio * scale,
                largest_stable=rate / ratio,
            )
            return


def _logits(start: Start) -> Iterator[Finding]:
    worst = max(start.values("attention.max_logit"), key=_value, default=None)
    if worst is not None and worst[2] > LOGITS:
        yield _finding(
            "start.logits",
            worst[1],
            f"attention logits reach {worst[2]:.3g} in {worst[1]} within {STEPS} steps",
            advice=advise(["qk_norm", "learning_rate"]),
            logit=worst[2],
        )


def _value(found: tuple[int, str, float]) -> float:
    return found[2]


def _saturated(start: Start) -> Iterator[Finding]:
    heads: dict[int, list[float]] = {}
    for step, _, theta in start.values("attention.theta.p50"):
        heads.setdefault(step, []).append(theta)
    shares = [sum(t < 0.5 for t in row) / len(row) for row in heads.values()]
    if shares and max(shares) > SATURATED:
        yield _finding(
            "start.saturated",
            "",
            f"{max(shares):.0%} of the heads are saturated from the start",
            advice=advise(["qk_norm", "temperature"]),
            share=max(shares),
        )


def _gradients(start: Start) -> Iterator[Finding]:
    low, high = GRADIENTS
    for step, _, ratio in start.values("gradient.first_to_last"):
        if not low <= ratio <= high:
            word = "vanish" if ratio < low else "explode"
            yield _finding(
                "start.gradient_ratio",
                "",
                f"gradients {word} over depth: the first block's norm is {ratio:.3g} "
                f"times the last block's at step {step}",
                advice=advise(["deepnorm_init", "residual_scale"]),
                ratio=ratio,
                at=step,
            )
            return


def _growth(start: Start) -> Iterator[Finding]:
    for reading in start.by_step.get("residual.B", {}).values():
        sizes = [max(row) for row in reading.values if row]
        if len(sizes) > 1 and sizes[0] > 0 and sizes[-1] / sizes[0] > GROWTH:
            yield _finding(
                "start.depth_scale",
                reading.sites[-1],
                f"the residual stream grows {sizes[-1] / sizes[0]:.3g}-fold over depth",
                advice=advise(["residual_scale"]) + "; or initialise with "
                "`equipoise plan`",
                growth=sizes[-1] / sizes[0],
            )
            return


def _first_loss(start: Start) -> Iterator[Finding]:
    losses = [value for _, _, value in start.values("loss")]
    if start.classes > 1 and losses:
        even = math.log(start.classes)
        if losses[0] > FIRST_LOSS * even:
            yield _finding(
                "start.first_loss",
                "",
                f"the loss starts at {losses[0]:.3g}, {losses[0] / even:.2g} times "
                f"that of equal probabilities ({even:.3g}): it starts too large",
                advice="initialise with the values of `equipoise plan`",
                loss=losses[0],
                even=even,
            )


def _adam_epsilon(start: Start) -> Iterator[Finding]:
    found: dict[str, float] = {}
    for _, site, ratio in start.values("optimizer.root_v_over_eps"):
        found[site] = ratio
    site = min(found, key=found.__getitem__, default="")
    if found and found[site] < ADAM:
        yield _finding(
            "start.adam_epsilon",
            site,
            f"gradients of {site or 'the model'} are only {found[site]:.2g} times "
            "Adam's ε: its updates shrink",
            advice="lower Adam's eps to 1e-8 or below, or scale the loss",
            ratio=found[site],
        )


def _rounding(start: Start) -> Iterator[Finding]:
    updates = updates_at_peak(start)
    moving = [u for u in updates.values() if u > NOTHING]
    if start.roundoff and moving and max(moving) < start.roundoff:
        yield _finding(
            "start.rounding",
            "",
            f"weights round at {start.roundoff:.2g} of their size and a step moves "
            f"them by at most {max(moving):.2g}: most updates are lost",
            advice="keep float32 weights and use autocast, not model.bfloat16()",
            update=max(moving),
            roundoff=start.roundoff,
        )


RULES: tuple[Callable[[Start], Iterator[Finding]], ...] = (
    *(_rate, _sharpness, _logits, _saturated, _gradients, _growth, _first_loss),
    *(_adam_epsilon, _rounding),
)
