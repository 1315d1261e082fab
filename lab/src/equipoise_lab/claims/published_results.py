"""Experimental claims, judged from the lab's committed results, never from memory.

Each pattern is a contrast with a 95 % interval over paired seeds (Student's t), and its
docstring says what would refute it. ``equipoise lab run NAME --publish docs/results``
makes a result again. Results are part of the repository, not of the wheel.
"""

import math
import os
import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import wraps
from pathlib import Path

from equipoise.errors import InputError
from equipoise_lab.claims.result import EMADI, Check, Found, Kind, Paper
from equipoise_lab.models import PATH_LENGTH
from equipoise_lab.results.evidence import Evidence
from equipoise_lab.results.statistics import PairedDifference, paired, seeds_to_decide
from equipoise_lab.studies import sizes
from equipoise_lab.studies.exponents import fitted_exponents, over_seeds, starts, trains

VARIABLE = "EQUIPOISE_RESULTS"
BUILT = Path(__file__).parents[4] / "docs" / "results"
MISSING: Found = ("not checkable here", {"result files found": 0.0})
"""The reader can verify it: set EQUIPOISE_RESULTS to a checkout's docs/results."""


EXPERIMENTS: dict[str, str] = {}
"""Claim → the experiment of the lab that it is judged by."""


def _folder() -> Path:
    return Path(os.environ.get(VARIABLE, BUILT))


def judged_by(
    name: str,
    paper: Paper,
    where: str,
    kind: Kind = "experiment",
    *,
    trend: tuple[str, ...] = (),
) -> Callable[[Callable[[Evidence], Found]], Check]:
    """Return a decorator: a check gets the committed evidence of an experiment.

    ``trend`` names what the claim needs above 0, as in the experiment's page of sizes:
    its slope per doubling of the width is put beside the evidence.
    """

    def decorated(check: Callable[[Evidence], Found]) -> Check:
        @wraps(check)
        def found() -> Found:
            path = _folder() / name / "raw.json"
            if not path.is_file():
                return MISSING
            try:
                verdict, numbers = check(Evidence.from_json(path.read_text()))
            except (ArithmeticError, InputError):  # a ratio of nothing and nothing
                return "not checkable here", {"numbers that can be compared": 0.0}
            return verdict, {**numbers, **_over_sizes(f"{name}-sizes", trend)}

        EXPERIMENTS[f"{paper.key}.{check.__name__}"] = name
        return paper.claim(where, kind=kind)(found)

    return decorated


def _over_sizes(page: str, wanted: tuple[str, ...]) -> dict[str, float]:
    """Return the slope per doubling of the width of what is wanted, with intervals."""
    path = _folder() / page / "raw.json"
    if not wanted or not path.is_file():
        return {}
    needs = sizes.needs_of(Evidence.from_json(path.read_text()))
    found: dict[str, float] = {}
    for need in needs:
        if f"{need.where}: {need.what}" in wanted:
            text = f"{need.where}, {need.what}, per doubling of the width"
            found |= _named(text, need.trend)
    return found


def _named(name: str, found: PairedDifference) -> dict[str, float]:
    return {name: found.mean, f"{name}, from": found.low, f"{name}, to": found.high}


def values(evidence: Evidence, arm: str, measure: str) -> list[float]:
    """Return a measure of one arm, seed by seed."""
    return [evidence.value(arm, seed, measure) for seed in evidence.seeds]


def over_arms(
    evidence: Evidence,
    measure: str,
    arms: Iterable[str] | None = None,
    *,
    change: Callable[[float], float] = float,
) -> list[float]:
    """Return a measure's mean over arms, seed by seed: arms of a seed share its data.

    Counting them one by one would make an interval of seeds too narrow.
    """
    named = list(evidence.runs if arms is None else arms)
    return [
        statistics.fmean(change(evidence.value(arm, seed, measure)) for arm in named)
        for seed in evidence.seeds
    ]


def contrast(
    evidence: Evidence, measure: str, arms: tuple[str, str], *, log: bool = False
) -> PairedDifference:
    """Return the first arm minus the second, seed by seed, in logarithms if asked."""
    a, b = (values(evidence, arm, measure) for arm in arms)
    if not log:
        return paired(a, b, digits=evidence.digits)
    found = paired([logarithm(v) for v in a], [logarithm(v) for v in b])
    # A number of n digits is off by up to half a unit in 10^(n-1): twice, in a ratio.
    lost = 10.0 ** (1 - evidence.digits) if evidence.digits else 0.0
    return replace(found, low=found.low - lost, high=found.high + lost)


def logarithm(value: float) -> float:
    """Return ln; minus infinity of nothing, so that it supports no pattern."""
    return math.log(value) if value > 0 else -math.inf


def over_zero(evidence: Evidence, arm: str, measure: str) -> PairedDifference:
    """Return the interval of a measure itself."""
    found = values(evidence, arm, measure)
    return paired(found, [0.0] * len(found), digits=evidence.digits)


def pattern(holds: bool, **intervals: PairedDifference) -> Found:
    """Return the verdict on a pattern with the intervals it stands on."""
    numbers: dict[str, float] = {}
    for name, found in intervals.items():
        text = name.replace("_", " ")
        numbers |= {**_named(text, found), "seeds": float(found.n)}
        if count := seeds_to_decide(found):
            numbers[f"{text}, seeds that would tell it from 0"] = float(count)
    return "pattern reproduced" if holds else "pattern not reproduced", numbers


PRE_POST = ("pre", "post")


@judged_by("prepost", EMADI, "Table 1", trend=("Table 1: post − pre",))
def pre_norm_ends_lower(evidence: Evidence) -> Found:
    """Held-out loss of pre-LN minus post-LN, nats per token.

    Claim: A deep pre-LN model ends at a lower loss than the post-LN model.

    Instead: Refuted by an interval that reaches 0. At 24 layers of width 64, one
    learning rate. DeepNorm, post-LN with scaled branches, ends below both.

    Practice: Pre-LN ends below plain post-LN, and DeepNorm below pre-LN: where norms
    come last, scale the branches.
    """
    found = contrast(evidence, "validation", PRE_POST)
    scaled = contrast(evidence, "validation", ("deepnorm", "pre"))
    return pattern(found.high < 0, pre_minus_post=found, deepnorm_minus_pre=scaled)


@judged_by(
    "prepost",
    EMADI,
    "Fig. 1",
    trend=("Fig. 1: ln(pre ÷ post) − ln 100", "Fig. 1: ln(10·pre)"),
)
def post_norm_gradients_vanish(evidence: Evidence) -> Found:
    """Weakest ÷ last gradient over depth: ln of pre-LN's over post-LN's.

    Claim: Post-LN gradients vanish in the early layers, pre-LN gradients do not.

    Instead: Refuted unless the contrast stays above ln 100 and pre-LN's own ratio
    above 0.1 (an interval each).

    Practice: Do not train a deep model with plain post-LN: place norms first or scale
    its branches (DeepNorm), and watch the gradient over depth.
    """
    found = contrast(evidence, "gradient_least_to_last", PRE_POST, log=True)
    pre = over_zero(evidence, "pre", "gradient_least_to_last")
    holds = found.low > math.log(100) and pre.low > 0.1
    return pattern(holds, ln_pre_over_post=found, pre_weakest_over_last=pre)


@judged_by(
    "prepost",
    EMADI,
    "Fig. 2, warm-up and G",
    trend=("Fig. 2: growth of pre", "Fig. 2: growth of post"),
)
def projection_gain_grows(evidence: Evidence) -> Found:
    """Growth of ln G from the first sample to the last, of both models.

    Claim: G = ‖W_O‖‖W_Q‖‖W_K‖‖W_V‖ grows in training, steepest after warm-up.

    Instead: Refuted by an interval of either model that reaches 0. G of the rescaled
    initialisation starts near its final size at width 64; its growth rises with width
    and is above 0 at 128 in pre-LN, so that size may be the reason.
    """
    pre, post = (over_zero(evidence, arm, "growth_G") for arm in PRE_POST)
    return pattern(min(pre.low, post.low) > 0, pre=pre, post=post)


@judged_by(
    "prepost",
    EMADI,
    "Fig. 4",
    trend=("Fig. 4: θ − 0.9995 of pre", "Fig. 4: θ − 0.9995 of post"),
)
def theta_stays_one(evidence: Evidence) -> Found:
    """The 5th percentile of θ over rows at the end of short training.

    Claim: θ/τ is 1.000 throughout training.

    Instead: Needs an interval of the 5th percentile above 0.9995 in both models. The
    median row stays at 1 in short runs; in long-trained models many heads do not.
    """
    pre, post = (over_zero(evidence, arm, "theta_p5") for arm in PRE_POST)
    return pattern(min(pre.low, post.low) >= 0.9995, pre=pre, post=post)


@judged_by("prepost", EMADI, "Fig. 5", trend=("Fig. 5: ln(pre ÷ post) − ln 10",))
def sensitivity_is_larger_in_pre_norm(evidence: Evidence) -> Found:
    """ln of pre-LN's S (residual stream) over post-LN's.

    Claim: S is about 1e5 in pre-LN and 1e3 in post-LN.

    Instead: Refuted unless the ratio's interval stays above 10.
    """
    found = contrast(evidence, "S_residual", PRE_POST, log=True)
    return pattern(found.low > math.log(10), ln_pre_over_post=found)


@judged_by(
    "prepost", EMADI, "Fig. 5, spread over layers", trend=("Fig. 5: pre − post",)
)
def sensitivity_spreads_more_in_pre_norm(evidence: Evidence) -> Found:
    """Coefficient of variation of S over layers, pre-LN minus post-LN.

    Claim: It is 0.97 in pre-LN and 0.40 in post-LN.

    Instead: Refuted by an interval that reaches 0.
    """
    found = contrast(evidence, "S_residual_cv", PRE_POST)
    return pattern(found.low > 0, pre_minus_post=found)


@judged_by(
    "prepost", EMADI, "Fig. 6", trend=("Fig. 6: pre − 1", "Fig. 6: pre ÷ 2 − |post|")
)
def sensitivity_grows_with_depth(evidence: Evidence) -> Found:
    """Slope of ln S over depth, of pre-LN and of post-LN.

    Claim: S grows with depth in pre-LN and is flat in post-LN.

    Instead: Refuted unless pre-LN's slope stays above 1 and post-LN's interval, in
    size, below half of pre-LN's.
    """
    pre, post = (over_zero(evidence, arm, "S_residual_slope") for arm in PRE_POST)
    flat = max(abs(post.low), abs(post.high)) < 0.5 * pre.low
    return pattern(pre.low > 1 and flat, pre=pre, post=post)


@judged_by("prepost", EMADI, "App. E.6", trend=("E.6: pre − 10·|post|",))
def growth_is_of_magnitude(evidence: Evidence) -> Found:
    """Growth of ln B̄² of the residual stream, pre-LN and post-LN.

    Claim: Magnitude, not G, drives the growth of S in pre-LN (2.91 against 1.29), and
    does not in post-LN (about 0).

    Instead: Refuted unless pre-LN's interval stays above both its growth of ln G and
    ten times post-LN's growth.
    """
    pre, post = (over_zero(evidence, arm, "growth_B2") for arm in PRE_POST)
    gain = over_zero(evidence, "pre", "growth_G")
    holds = pre.low > max(gain.high, 10 * abs(post.low), 10 * abs(post.high))
    return pattern(holds, pre=pre, post=post, pre_of_G=gain)


@judged_by(
    "exponents",
    EMADI,
    "§6, exponents m = 4, 3, 2",
    "recommendation",
    trend=tuple(
        f"{kind}, {edge}: 0.1 − |exponent + 1/{m}|"
        for kind, m in PATH_LENGTH.items()
        for edge in ("trains", "starts")
    ),
)
def exponents_of_training(evidence: Evidence) -> Found:
    """Fitted exponent over depth of the largest gain that trains, or starts.

    Claim: The largest stable gain falls like N^(−1/m), m = 4, 3 and 2.

    Instead: Refuted by an interval over seeds without −1/m; reproduced only by three
    that stay within 0.1 of it. The gain that trains does not fall with depth; that of
    which the first gradient does not explode falls (m = 4).

    Practice: The largest gain that trains did not fall with depth: leave pre-LN gains
    at 1 rather than N^(−1/m).
    """
    numbers: dict[str, float] = {}
    excluded, close = [], []
    for kind, m in (("standard", 4), ("shared", 3), ("linear", 2)):
        fits = fitted_exponents(evidence, kind, trains)
        if len(fits) >= 2:
            held = over_seeds(fits)
            excluded.append(not held.low <= -1 / m <= held.high)
            close.append(max(-1 / m - held.low, held.high + 1 / m) < 0.1)
            numbers |= _named(f"m = {m}, trains", held)
    first = fitted_exponents(evidence, "standard", starts)
    if len(first) >= 2:
        numbers |= _named("m = 4, first gradient", over_seeds(first))
    if any(excluded):
        return "pattern not reproduced", numbers
    if close and all(close):
        return "pattern reproduced", numbers
    return "not checkable here", numbers


@judged_by(
    "sharpening",
    EMADI,
    "§4, θ ≈ 1 persists",
    trend=(
        "lr 0.001: 5th percentile of θ − 0.99",
        "lr 0.004: 5th percentile of θ − 0.99",
    ),
)
def theta_persists(evidence: Evidence) -> Found:
    """The 5th percentile of θ after longer training, at two learning rates.

    Claim: θ stays near 1 as training goes on.

    Instead: Needs an interval above 0.99 at both rates. It stays at the lower rate and
    falls at the higher one.

    Practice: Watch the 5th percentile of θ; it falls when the learning rate is high.
    """
    low, high = (over_zero(evidence, arm, "theta_p5") for arm in evidence.runs)
    return pattern(min(low.low, high.low) > 0.99, lower_rate=low, higher_rate=high)


@judged_by("vanishing", EMADI, "§5, projection-like Jacobians")
def post_norm_decay_comes_with_collapse(evidence: Evidence) -> Found:
    """ln of pre-LN's weakest ÷ last gradient over post-LN's, at the start and the end.

    Claim: J_LN acts like a projection, so post-LN gradients decay exponentially with
    depth from initialisation on.

    Instead: At initialisation norm and branch factors cancel; the decay comes when the
    tokens collapse. The claim needs a contrast above ln 10 at the start.
    """
    names = ("gradient_least_to_last_start", "gradient_least_to_last")
    start, end = (contrast(evidence, name, PRE_POST, log=True) for name in names)
    return pattern(start.low > math.log(10), start=start, end=end)


@judged_by("temperature", EMADI, "§6, temperature warm-up", "recommendation")
def temperature_throttles_gradients_only(evidence: Evidence) -> Found:
    """Early gradient and early update of Q and K under τ warm-up, over none (ln).

    Claim: Temperature warm-up throttles the early steps of attention as learning-rate
    warm-up does, so that it can replace it.

    Instead: It throttles the gradient of Q and K and, under Adam, no update: the claim
    needs an update ratio whose interval stays below 0.9 (that of learning-rate warm-up
    is 0.3).

    Practice: Do not replace learning-rate warm-up by temperature warm-up: under Adam
    it makes no update smaller.
    """
    pairs = [
        (arm, arm.replace("tau", "none"))
        for arm in evidence.runs
        if "tau" in arm and arm.replace("tau", "none") in evidence.runs
    ]
    if not pairs:
        return "not checkable here", {"arms with and without warm-up": 0.0}
    with_tau, without = zip(*pairs, strict=True)
    gradient, update = (
        paired(
            *(
                over_arms(evidence, f"early_{what}_qk", arms, change=logarithm)
                for arms in (with_tau, without)
            )
        )
        for what in ("gradient", "update")
    )
    return pattern(update.high < math.log(0.9), ln_gradient=gradient, ln_update=update)
