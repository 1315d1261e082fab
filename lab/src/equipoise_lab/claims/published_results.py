"""Experimental claims, judged from the lab's committed results, never from memory.

Each pattern is a contrast with a 95 % interval over paired seeds (Student's t), and its
docstring says what would refute it. ``equipoise lab run NAME --publish docs/results``
makes a result again. Results are part of the repository, not of the wheel.
"""

import itertools
import math
import os
import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import wraps
from pathlib import Path

from equipoise.errors import InputError
from equipoise.numerics.scaling import PRINTED_PATH_LENGTH
from equipoise_lab.claims.result import (
    EMADI,
    Check,
    Found,
    Kind,
    Paper,
    judged_pattern,
)
from equipoise_lab.claims.rules import Parts, above, below, within
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


def by_layer(evidence: Evidence, curve: str, arm: str) -> list[float]:
    """Return each layer's median over the seeds, at the end of training."""
    return [float(v) for v in evidence.curves[curve][arm]["end"]]


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


def pattern(parts: Parts, **intervals: PairedDifference) -> Found:
    """Return the label that parts give, with the intervals they stand on."""
    numbers: dict[str, float] = {}
    for name, found in intervals.items():
        text = name.replace("_", " ")
        numbers |= {**_named(text, found), "seeds": float(found.n)}
        if count := seeds_to_decide(found):
            numbers[f"{text}, seeds that would tell it from 0"] = float(count)
    return judged_pattern(parts, numbers)


PRE_POST = ("pre", "post")


@judged_by("prepost", EMADI, "Table 1", trend=("Table 1: post − pre",))
def pre_norm_ends_lower(evidence: Evidence) -> Found:
    """Held-out loss of pre-LN minus post-LN, nats per token.

    Claim: A deep pre-LN model ends at a lower loss than the post-LN model.

    Rule: The interval of pre-LN minus post-LN lies below 0.

    Instead: At 24 layers of width 64 and one learning rate. DeepNorm, post-LN with
    scaled branches, ends below both.

    Practice: Pre-LN ends below plain post-LN, and DeepNorm below pre-LN: where norms
    come last, scale the branches.
    """
    found = contrast(evidence, "validation", PRE_POST)
    scaled = contrast(evidence, "validation", ("deepnorm", "pre"))
    parts = {"pre − post below 0": below(found)}
    return pattern(parts, pre_minus_post=found, deepnorm_minus_pre=scaled)


@judged_by(
    "prepost",
    EMADI,
    "Fig. 1",
    trend=("Fig. 1: ln(pre ÷ post) − ln 100", "Fig. 1: ln(10·pre)"),
)
def post_norm_gradients_vanish(evidence: Evidence) -> Found:
    """Weakest ÷ last gradient over depth: ln of pre-LN's over post-LN's.

    Claim: Post-LN gradients vanish in the early layers, pre-LN gradients do not.

    Rule: Two parts: the contrast's interval lies above ln 100; that of pre-LN's own
    ratio above 0.1.

    Instead: It is so here, at 24 layers of width 64; DeepNorm's do not vanish either.

    Practice: Do not train a deep model with plain post-LN: place norms first or scale
    its branches (DeepNorm), and watch the gradient over depth.
    """
    found = contrast(evidence, "gradient_least_to_last", PRE_POST, log=True)
    pre = over_zero(evidence, "pre", "gradient_least_to_last")
    parts = {
        "post-LN's weakest gradient is 100 times smaller": above(found, math.log(100)),
        "pre-LN's weakest is above a tenth of its last": above(pre, 0.1),
    }
    return pattern(parts, ln_pre_over_post=found, pre_weakest_over_last=pre)


@judged_by(
    "prepost",
    EMADI,
    "Fig. 2, growth of G",
    trend=("Fig. 2: growth of pre", "Fig. 2: growth of post"),
)
def projection_gain_grows(evidence: Evidence) -> Found:
    """Growth of ln G from the first sample to the last, of both models.

    Claim: G = ‖W_O‖‖W_Q‖‖W_K‖‖W_V‖ grows in training in both architectures.

    Rule: One part for each architecture and width (64, and the largest there is,
    nearest to the paper's 1280): the growth's interval lies above 0.

    Instead: At width 64 it falls by 3 to 5 % in both, in short runs from a rescaled
    initialisation; its growth rises with width.
    """
    found = {a: over_zero(evidence, a, "growth_G") for a in PRE_POST}
    parts = {f"{arm}: growth of ln G above 0": above(one) for arm, one in found.items()}
    path = _folder() / "prepost-sizes" / "raw.json"
    if path.is_file():
        wide = Evidence.from_json(path.read_text())
        for arm in PRE_POST:
            one = over_zero(wide, f"{arm} 128", "growth_G")
            found[f"{arm}_at_width_128"] = one
            parts[f"{arm} at width 128: growth of ln G above 0"] = above(one)
    return pattern(parts, **found)


@judged_by("prepost", EMADI, "Fig. 4")
def theta_stays_one(evidence: Evidence) -> Found:
    """The median of θ over rows at the end of short training.

    Claim: θ/τ, of sampled attention rows, reads 1.000 at the end of training in both
    architectures.

    Rule: The interval of the median lies at 0.9995 or above in both: what prints 1.000.

    Instead: The median row does. Not every row: see ``every_row_stays_at_one``.
    """
    return _theta(evidence, "theta_p50")


@judged_by(
    "prepost",
    EMADI,
    "ours, on Fig. 4: every row",
    trend=("Fig. 4: θ − 0.9995 of pre", "Fig. 4: θ − 0.9995 of post"),
)
def every_row_stays_at_one(evidence: Evidence) -> Found:
    """The 5th percentile of θ over rows at the end of short training.

    Claim: θ/τ is 1.000 in nearly every row, its 5th percentile included.

    Rule: The interval of the 5th percentile lies at 0.9995 or above in both.

    Instead: One row in twenty is below 0.9985 (pre-LN) and 0.9886 (post-LN).
    """
    return _theta(evidence, "theta_p5")


def _theta(evidence: Evidence, measure: str) -> Found:
    found = {arm: over_zero(evidence, arm, measure) for arm in PRE_POST}
    parts = {f"{arm}: prints 1.000": above(f, 0.9995) for arm, f in found.items()}
    return pattern(parts, **found)


@judged_by("prepost", EMADI, "Fig. 5", trend=("Fig. 5: ln(pre ÷ post) − ln 10",))
def sensitivity_is_larger_in_pre_norm(evidence: Evidence) -> Found:
    """ln of pre-LN's S (residual stream) over post-LN's.

    Claim: S is larger in pre-LN: a median of about 1e5, against 1e3 in post-LN.

    Rule: Three parts: the ratio's interval lies above 10; each architecture's interval
    of S lies within a factor of 3 of the number given.

    Instead: The order is reproduced. The numbers are those of a larger model.
    """
    found = contrast(evidence, "S_residual", PRE_POST, log=True)
    pre, post = (over_zero(evidence, arm, "S_residual") for arm in PRE_POST)
    parts = {
        "ten times larger in pre-LN": above(found, math.log(10)),
        "about 1e5 in pre-LN": within(pre, 1e5 / 3, 3e5),
        "about 1e3 in post-LN": within(post, 1e3 / 3, 3e3),
    }
    return pattern(parts, ln_pre_over_post=found, pre=pre, post=post)


@judged_by(
    "prepost", EMADI, "Fig. 5, spread over layers", trend=("Fig. 5: pre − post",)
)
def sensitivity_spreads_more_in_pre_norm(evidence: Evidence) -> Found:
    """Coefficient of variation of S over layers, pre-LN minus post-LN.

    Claim: It is higher in pre-LN: 0.97, against 0.40 in post-LN.

    Rule: Three parts: the difference's interval lies above 0; each architecture's
    interval lies within 0.1 of the number given.

    Instead: The order is reproduced; the numbers are those of a larger model.
    """
    found = contrast(evidence, "S_residual_cv", PRE_POST)
    pre, post = (over_zero(evidence, arm, "S_residual_cv") for arm in PRE_POST)
    parts = {
        "higher in pre-LN": above(found),
        "0.97 in pre-LN": within(pre, 0.87, 1.07),
        "0.40 in post-LN": within(post, 0.3, 0.5),
    }
    return pattern(parts, pre_minus_post=found, pre=pre, post=post)


@judged_by(
    "prepost", EMADI, "Fig. 6", trend=("Fig. 6: pre − 1", "Fig. 6: pre ÷ 2 − |post|")
)
def sensitivity_grows_with_depth(evidence: Evidence) -> Found:
    """Slope of ln S over depth in pre-LN; S by layer, medians over the seeds, in both.

    Claim: S grows monotonically with depth in pre-LN and is flat in post-LN.

    Rule: Three parts: the interval of pre-LN's slope lies above 0; its medians by layer
    rise at every layer; post-LN's spread by less than a factor of 1.5 from the second
    layer on. (The first layer's input no norm has bounded.) Medians have no interval.

    Instead: As stated, at 24 layers of width 64; the first layer of post-LN, whose
    input no norm has bounded, lies far below the others.
    """
    pre, post = (over_zero(evidence, arm, "S_residual_slope") for arm in PRE_POST)
    layers = {a: by_layer(evidence, "sensitivity.S_residual", a) for a in PRE_POST}
    rises = [b / a for a, b in itertools.pairwise(layers["pre"])]
    spread = max(layers["post"][1:]) / min(layers["post"][1:])
    parts = {
        "grows with depth in pre-LN": above(pre),
        "at every layer": min(rises) > 1,
        "flat in post-LN": spread < 1.5,
    }
    numbers = {
        **_named("slope of pre", pre),
        **_named("slope of post, first layer included", post),
        "pre: least rise from layer to layer": min(rises),
        "post: largest ÷ least, from the second layer": spread,
        "post: first layer ÷ second": layers["post"][0] / layers["post"][1],
    }
    return judged_pattern(parts, numbers, interval=False)


@judged_by("prepost", EMADI, "Table 1, spikes")
def spikes_are_of_post_norm(evidence: Evidence) -> Found:
    """Spikes of the loss a run, post-LN minus pre-LN.

    Claim: Pre-LN has no spikes (0.0 ± 0.0); post-LN has some (0.3 ± 0.5 a run).

    Rule: Two parts: no run of pre-LN has one; the interval of the difference lies above
    0. The paper's own 0.3 ± 0.5 is one run of three.

    Instead: One run of five has one, in post-LN; neither three runs nor five tell that
    from chance.
    """
    found = contrast(evidence, "spikes", PRE_POST[::-1])
    most = max(values(evidence, "pre", "spikes"))
    parts = {"none in pre-LN": most == 0, "more in post-LN": above(found)}
    verdict, numbers = pattern(parts, post_minus_pre=found)
    return verdict, {**numbers, "most in a run of pre-LN": most}


@judged_by("prepost", EMADI, "App. E.6", trend=("E.6: pre − 10·|post|",))
def growth_is_of_magnitude(evidence: Evidence) -> Found:
    """Growth of ln B̄² of the residual stream, pre-LN and post-LN.

    Claim: Magnitude, not G, drives the growth of S in pre-LN (2.91 against 1.29), and
    does not in post-LN (about 0).

    Rule: Three parts: pre-LN's growth of ln B̄² lies above its growth of ln G;
    post-LN's lies within 0.05 of 0; G itself grows in both (an interval above 0 each).

    Instead: Magnitude grows as claimed. G does not grow here at all, so that what the
    paper sets beside each other, 2.91 against 1.29, is not reproduced.
    """
    pre, post = (over_zero(evidence, arm, "growth_B2") for arm in PRE_POST)
    gains = [over_zero(evidence, arm, "growth_G") for arm in PRE_POST]
    grown_by = (values(evidence, "pre", f"growth_{what}") for what in ("B2", "G"))
    minus = paired(*grown_by)
    grown = [above(gain) for gain in gains]
    parts = {
        "pre-LN: B̄² grows more than G": above(minus),
        "post-LN: B̄² stays": within(post, -0.05, 0.05),
        "G grows in both": None if None in grown else all(grown),
    }
    return pattern(parts, pre=pre, post=post, pre_of_G=gains[0], post_of_G=gains[1])


@judged_by(
    "exponents",
    EMADI,
    "§6, exponents m = 4, 3, 2",
    "recommendation",
    trend=tuple(
        f"{kind}, {edge}: 0.1 − |exponent + 1/{m}|"
        for kind, m in PRINTED_PATH_LENGTH.items()
        for edge in ("trains", "starts")
    ),
)
def exponents_of_training(evidence: Evidence) -> Found:
    """Fitted exponent over depth of the largest gain that trains, or starts.

    Claim: The largest stable gain falls like N^(−1/m), m = 4, 3 and 2.

    Rule: One part for each m: false where the interval over seeds does not hold −1/m,
    true where it stays within 0.1 of it.

    Instead: The gain that trains does not fall with depth; that of which the first
    gradient does not explode falls (m = 4). By our count m is 4, 4 and about 3: see
    ``path_counts``.

    Practice: The largest gain that trains did not fall with depth: leave pre-LN gains
    at 1 rather than N^(−1/m).
    """
    numbers: dict[str, float] = {}
    parts: dict[str, bool | None] = {}
    for kind, m in PRINTED_PATH_LENGTH.items():
        fits = fitted_exponents(evidence, kind, trains)
        if len(fits) >= 2:
            held = over_seeds(fits)
            near = within(held, -1 / m - 0.1, -1 / m + 0.1)
            inside = held.low <= -1 / m <= held.high
            parts[f"m = {m}: −1/{m}"] = (near or None) if inside else False
            numbers |= _named(f"m = {m}, trains", held)
    first = fitted_exponents(evidence, "standard", starts)
    if len(first) >= 2:
        numbers |= _named("m = 4, first gradient", over_seeds(first))
    if not parts:
        return "not checkable here", numbers
    return judged_pattern(parts, numbers)


@judged_by("sharpening", EMADI, "§4, θ ≈ 1 persists")
def theta_persists(evidence: Evidence) -> Found:
    """The median of θ after longer training, at two learning rates.

    Claim: θ ≈ 1 of typical attention persists as training goes on.

    Rule: The interval of the median lies above 0.99 at both rates.

    Instead: The median row's does. Its 5th percentile falls where the learning rate is
    high: see ``sharp_rows_appear``.
    """
    return _persists(evidence, "theta_p50")


@judged_by(
    "sharpening",
    EMADI,
    "ours, on §4: the sharpest rows",
    trend=(
        "lr 0.001: 5th percentile of θ − 0.99",
        "lr 0.004: 5th percentile of θ − 0.99",
    ),
)
def sharp_rows_appear(evidence: Evidence) -> Found:
    """The 5th percentile of θ after longer training, at two learning rates.

    Claim: Hardly any row sharpens: the 5th percentile of θ stays above 0.99.

    Rule: The interval of the 5th percentile lies above 0.99 at both rates.

    Instead: It stays there at the lower rate and falls to 0.85 at the higher one.

    Practice: Watch the 5th percentile of θ; it falls when the learning rate is high.
    """
    return _persists(evidence, "theta_p5")


def _persists(evidence: Evidence, measure: str) -> Found:
    found = {
        name: over_zero(evidence, arm, measure)
        for name, arm in zip(("lower_rate", "higher_rate"), evidence.runs, strict=True)
    }
    parts = {n.replace("_", " "): above(one, 0.99) for n, one in found.items()}
    return pattern(parts, **found)


@judged_by("vanishing", EMADI, "§1 (4) and §5.3, decay of post-LN gradients")
def post_norm_decay_comes_with_collapse(evidence: Evidence) -> Found:
    """ln of pre-LN's weakest ÷ last gradient over post-LN's, at the start and the end.

    Claim: Products of LayerNorm Jacobians make post-LN gradients decay exponentially
    with depth, along the directions they contract, which is why deep post-LN models are
    hard to train.

    Rule: Two parts: the contrast's interval lies above ln 10 at initialisation (where
    the Jacobians are those of the theorem), and at the end of training.

    Instead: At initialisation norm and branch factors cancel; the decay comes when the
    tokens collapse.
    """
    names = ("gradient_least_to_last_start", "gradient_least_to_last")
    start, end = (contrast(evidence, name, PRE_POST, log=True) for name in names)
    limit = math.log(10)
    parts = {"at the start": above(start, limit), "at the end": above(end, limit)}
    return pattern(parts, start=start, end=end)


@judged_by("temperature", EMADI, "§6.3, temperature warm-up", "recommendation")
def temperature_throttles_gradients_only(evidence: Evidence) -> Found:
    """Held-out loss under learning-rate and under τ warm-up, each minus without (nats).

    Claim: Temperature warm-up stabilises as learning-rate warm-up does, so that it can
    replace it.

    Rule: Each architecture is one part. It is decided only where learning-rate warm-up
    itself lowers the loss (an interval below 0): then true if τ warm-up lowers it too
    and no less than half as much, false otherwise.

    Instead: Undecided: learning-rate warm-up itself has no effect here that five seeds
    could tell from 0, so there is nothing to replace. Under Adam τ warm-up lowers the
    gradient of Q and K and no update.

    Practice: Nothing here says that temperature warm-up replaces learning-rate warm-up:
    under Adam it makes no update smaller.
    """
    parts: dict[str, bool | None] = {}
    found: dict[str, PairedDifference] = {}
    for place in PRE_POST:
        arms = {
            kind: [a for a in evidence.runs if a.startswith(f"{place}-{kind}-")]
            for kind in ("none", "lr", "tau")
        }
        if not all(arms.values()):
            return "not checkable here", {"arms with and without warm-up": 0.0}
        none, usual, ours = (
            over_arms(evidence, "validation", arms[kind]) for kind in arms
        )
        by_rate, by_tau = paired(usual, none), paired(ours, none)
        found[f"{place}_lr_minus_none"] = by_rate
        found[f"{place}_tau_minus_none"] = by_tau
        helps = below(by_rate)
        half = paired(ours, [(a + b) / 2 for a, b in zip(usual, none, strict=True)])
        parts[f"{place}: as learning-rate warm-up does"] = (
            below(half) if helps else None
        )
        for what in ("gradient", "update"):
            measure = f"early_{what}_qk"
            both = (
                over_arms(evidence, measure, arms[kind], change=logarithm)
                for kind in ("tau", "none")
            )
            found[f"{place}_ln_{what}_of_Q_and_K"] = paired(*both)
    return pattern(parts, **found)
