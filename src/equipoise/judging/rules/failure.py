"""The forecast as a rule: its alarm makes a run at risk before the loss shows it."""

import math

from equipoise.judging.causes import REMEDIES, in_words
from equipoise.judging.features import (
    AFTER_UPDATE,
    NUMBERS,
    QUANTITIES,
    UNIT,
    Sample,
    described,
)
from equipoise.judging.history import History
from equipoise.judging.remedy_catalogue import advise
from equipoise.judging.rules.registry import Measured, measures
from equipoise.judging.score import Forecast, Forecaster

FORECAST = "forecast.failure"
EASED = 0.1
"""Probability below which a reading speaks for the end of an alarm, whatever the stake:
in the 160 recorded storms of seeds 2, 4, 10 and 12 no alarm began below 0.2."""


def sample_from(history: History) -> Sample:
    """Return what was read in this step.

    The gradient is read before the optimiser's step, and the forecast with it: what is
    read after that step is the sample's before.
    """
    found = {q: history.last(q) for q in QUANTITIES}
    table = {
        q: dict(zip(r.sites, r.values, strict=True))
        for q, r in found.items()
        if r is not None and (r.step == history.step or q in AFTER_UPDATE)
    }
    fresh = not history.is_continued
    return Sample(history.step, table, history.blocks, fresh=fresh)


def forecast_of(history: History) -> Forecast | None:
    """Return the latest forecast of a run."""
    forecaster: Forecaster | None = history.recall(FORECAST)
    return forecaster.last if forecaster else None


def outside_band(history: History) -> list[str]:
    """Return the quantities that have left the band of stable runs so far."""
    forecaster: Forecaster | None = history.recall(FORECAST)
    left = forecaster.left if forecaster else ()
    numbers = (feature.rpartition(", ")[0] for feature in left)
    return [NUMBERS[name].quantity for name in numbers]


def _farthest(found: Forecast) -> dict[str, str]:
    """Return the quantity of the reading that is farthest out: the one to look at."""
    if not found.reasons:
        return {}
    return {"quantity": NUMBERS[found.reasons[0][0].rpartition(", ")[0]].quantity}


@measures(FORECAST)
def failure(history: History) -> Measured | None:
    """The e-detector's stake, ln M / ln A, while a failure is likely at all.

    Nothing once no gradient is finite.

    The odds are those of stable runs that were read every five steps. Readings that lie
    closer are left out: a change over six of them would be told as one over thirty
    steps, and a bet on a reading that hardly differs from the last one is no new bet.
    """
    forecaster: Forecaster = history.memory(FORECAST, Forecaster)
    last = forecaster.last
    if last is not None and 0 < history.step - last.step < UNIT:
        return None
    sample = sample_from(history)
    if not any(map(math.isfinite, sample.numbers("gradient.norm"))):
        return None  # it has failed: there is nothing left to foresee
    found = forecaster.add(sample)
    reasons = ", ".join(described(name, value) for name, value, _ in found.reasons)
    return Measured(
        value=found.stake if found.probability >= EASED else 0.0,
        site=found.site,
        advice=advise(REMEDIES.get(found.cause, ()), found.cause),
        evidence={
            "probability": found.probability,
            "horizon": found.horizon,
            "expected": found.expected,
            "cause": found.cause,
            "words": in_words(found.cause, history),
            "reasons": reasons or "many small changes",
            **_farthest(found),
        },
    )
