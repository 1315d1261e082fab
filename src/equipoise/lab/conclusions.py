"""What an experiment's numbers say in one sentence, failed patterns included."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from equipoise.lab.experiment import Arm, Experiment
from equipoise.lab.fits import largest_that_trains, power_law, rank_correlation
from equipoise.lab.models import PATH_LENGTH
from equipoise.lab.models.config import Attention
from equipoise.lab.results import Row

Conclusion = Callable[[Experiment, Sequence[Row]], str]


def prepost(experiment: Experiment, rows: Sequence[Row]) -> str:
    """Say whether Emadi's pattern holds: post-LN starves its early layers."""
    by_arm = {row.arm: row for row in rows}
    if not {"pre", "post"} <= by_arm.keys():
        return "pre and post are not both finished yet."
    pre, post = by_arm["pre"], by_arm["post"]
    return " ".join([_starved(post), _carried(pre), _apart(pre, post)])


def _mean(row: Row, measure: str) -> float | None:
    found = row.values.get(measure)
    return found.mean if found else None


def _starved(post: Row) -> str:
    least = _mean(post, "gradient_least_to_last")
    if least is None:
        return "Gradients over depth were not recorded."
    said = f"post-LN's weakest layer gets {least:.1e} of the last layer's gradient"
    return f"{said}: its early layers do not learn." if least < 1e-3 else f"{said}."


def _carried(pre: Row) -> str:
    spread = _mean(pre, "gradient_spread")
    if spread is None:
        return ""
    return f"pre-LN's layers 2…N stay within a factor of {spread:.2g}."


def _apart(pre: Row, post: Row) -> str:
    a, b = _mean(pre, "validation"), _mean(post, "validation")
    if a is None or b is None:
        return ""
    better, worse = ("pre", "post") if a < b else ("post", "pre")
    return f"{better}-LN ends {abs(a - b):.2f} nats per token below {worse}-LN."


def exponents(experiment: Experiment, rows: Sequence[Row]) -> str:
    """Fit the largest gain that trains over depth, for each kind of attention."""
    found: dict[Attention, dict[int, dict[float, float]]] = {}
    for arm, row in _finished(experiment, rows):
        by_depth = found.setdefault(arm.model.attention, {})
        by_gain = by_depth.setdefault(arm.model.depth, {})
        by_gain[arm.model.gain] = row.values["validation"].mean
    said = [_exponent(kind, by_depth) for kind, by_depth in found.items()]
    return "Largest gain over depth N: " + "; ".join(said) + "."


def _exponent(kind: Attention, by_depth: Mapping[int, Mapping[float, float]]) -> str:
    largest = {n: largest_that_trains(gains) for n, gains in by_depth.items()}
    known = {n: gain for n, gain in largest.items() if gain is not None}
    predicted = f"predicted {-1 / PATH_LENGTH[kind]:+.2f}"
    if len(known) < 2:
        return f"{kind}: too few depths trained ({predicted})"
    law = power_law(list(known), list(known.values()))
    return f"{kind}: exponent {law} ({predicted})"


def rates(experiment: Experiment, rows: Sequence[Row]) -> str:
    """Rank the largest rate that trains against S at the first sample."""
    losses: dict[str, dict[float, float]] = {}
    start: dict[str, float] = {}
    for arm, row in _finished(experiment, rows):
        shape = arm.name.rsplit("-lr", 1)[0]
        losses.setdefault(shape, {})[arm.train.lr] = row.values["validation"].mean
        if "S_start" in row.values:
            start[shape] = row.values["S_start"].mean
    largest = {shape: largest_that_trains(found) for shape, found in losses.items()}
    known = [s for s in largest if largest[s] is not None and s in start]
    rho = rank_correlation([start[s] for s in known], [largest[s] or 0 for s in known])
    listed = ", ".join(f"{s} {largest[s]:g}" for s in known)
    return f"Largest rate that trains: {listed}. Rank correlation with S: {rho:+.2f}."


def _finished(experiment: Experiment, rows: Sequence[Row]) -> Iterator[tuple[Arm, Row]]:
    by_arm = {row.arm: row for row in rows}
    for arm in experiment.arms:
        if arm.name in by_arm and "validation" in by_arm[arm.name].values:
            yield arm, by_arm[arm.name]


CONCLUSIONS: dict[str, Conclusion] = {
    "prepost": prepost,
    "demo": prepost,
    "exponents": exponents,
    "rates": rates,
}


def conclusion(experiment: Experiment, rows: Sequence[Row]) -> str:
    """Return the experiment's finding; without one of its own, its pairs."""
    own = CONCLUSIONS.get(experiment.name.removesuffix("-quick"))
    if own is not None:
        return own(experiment, rows)
    pairs = [f"{row.arm}: {row.against_first}" for row in rows if row.against_first]
    return "; ".join(pairs) or "nothing to compare yet."
