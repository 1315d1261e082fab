"""Findings of all four papers but Emadi's training, judged from committed results.

Where an experiment has seeds, a pattern is an interval over them; Mudarisov's figures
come from one trained model, as theirs do, and say so.
"""

import itertools
import statistics

import numpy as np

from equipoise_lab.claims.published_results import (
    contrast,
    judged_by,
    logarithm,
    over_arms,
    pattern,
    values,
)
from equipoise_lab.claims.result import (
    BAEK_V1,
    BAEK_V2,
    EMADI,
    MUDARISOV,
    PETROV,
    Found,
)
from equipoise_lab.results.evidence import Evidence
from equipoise_lab.results.statistics import PairedDifference, paired, power_law

ONE_MODEL = {"models": 1.0}


def _of_one_model(holds: bool, **numbers: float) -> Found:
    verdict = "pattern reproduced" if holds else "pattern not reproduced"
    named = {name.replace("_", " "): value for name, value in numbers.items()}
    return verdict, named | ONE_MODEL  # type: ignore[return-value]


@judged_by("theorem", EMADI, "Fig. 3")
def brute_force_agrees(evidence: Evidence) -> Found:
    """The largest |θ − τ‖J‖| over rows of 4, 8 and 12 keys at three temperatures.

    Claim: ‖J‖ by brute force over all signs lies on the line θ/τ.

    Instead: Refuted by an error above rounding, 1e-9. It does; the heuristic that the
    paper measures θ with does not (see ``greedy_prefix``).
    """
    errors = [v for arm in evidence.runs for v in values(evidence, arm, "theta_error")]
    norms = [v for arm in evidence.runs for v in values(evidence, arm, "norm")]
    worst = max(errors)
    verdict, numbers = pattern(worst < 1e-9 < min(norms))
    return verdict, {**numbers, "largest error": worst, "seeds": len(evidence.seeds)}


@judged_by("selection-paper", MUDARISOV, "Fig. 2a, Algorithm 1")
def distance_grows_linearly(evidence: Evidence) -> Found:
    """Exponent over L of d̃ of the top 5, MiniLM, all heads.

    Claim: d̃ of the N largest weights grows about linearly with L.

    Instead: Refuted by an exponent outside 0.8 … 1.2. It does; so would Σ‖y‖.
    """
    one = evidence.curves["lengths"]["d̃"]
    fitted = power_law(one["x"], one["true"])
    return _of_one_model(0.8 < fitted.exponent < 1.2, exponent=fitted.exponent)


@judged_by("selection-paper", MUDARISOV, "Fig. 2b, Algorithm 2")
def few_tokens_are_enough(evidence: Evidence) -> Found:
    """d̃ at N = 100 over d̃ at N = 20, and over its expectation.

    Claim: Beyond N = 20 little is gained; by N ≈ 100 true and expected d̃ meet.

    Instead: Refuted by a change of 25 % or more, or d̃/E[d̃] above 1.2 at N = 100. The
    first part holds here, the second does not.
    """
    one = evidence.curves["sizes"]["d̃"]
    at = {int(n): i for i, n in enumerate(one["x"])}
    change = one["true"][at[100]] / one["true"][at[20]]
    lift = one["true"][at[100]] / one["expected_high"][at[100]]
    holds = abs(change - 1) < 0.25 and lift < 1.2
    return _of_one_model(holds, change_from_20_to_100=change, least_lift_at_100=lift)


@judged_by("selection-paper", MUDARISOV, "Fig. 3, Algorithm 4")
def separability_settles(evidence: Evidence) -> Found:
    """N_s/N from N = 16 on, and of random sets.

    Claim: N_s/N falls until N ≈ 16 and then stays between 0.70 and 0.85.

    Instead: Refuted by a mean over heads outside 0.65 … 0.90. It settles lower here:
    dimension decides (see ``eighty_percent``).
    """
    one = evidence.curves["separability"]["recall"]
    late = [m for n, m in zip(one["x"], one["mean"], strict=True) if n >= 16]
    holds = all(0.65 <= m <= 0.9 for m in late)
    return _of_one_model(holds, least=min(late), largest=max(late))


@judged_by("selection-paper", MUDARISOV, "Fig. 4, Algorithm 5")
def sensitivity_over_temperature(evidence: Evidence) -> Found:
    """g at T = 0.01 over g at T = 0.1, and how far curves of ε are apart from T = 1.

    Claim: Below T = 0.1 sensitivity grows like 1/T; from T = 1 the curves merge.

    Instead: Refuted by a growth outside 5 … 20 or a spread above 1.5. The curves merge;
    trained rows saturate before 1/T shows.
    """
    lines = list(evidence.curves["gradient"].values())
    small = dict(zip(lines[0]["x"], lines[0]["y"], strict=True))
    growth = small[0.01] / small[0.1]
    warm = [i for i, T in enumerate(lines[0]["x"]) if T >= 1]
    spread = max(
        max(c["y"][i] for c in lines) / min(c["y"][i] for c in lines) for i in warm
    )
    return _of_one_model(
        5 < growth < 20 and spread < 1.5, growth=growth, spread_from_1=spread
    )


@judged_by("curvature", PETROV, "Figs 5, 11")
def feedforward_curvature_is_small(evidence: Evidence) -> Found:
    """ln of ‖H‖ of the feed-forward weights over that of the values, at the end.

    Claim: The feed-forward net's curvature is small beside the values'.

    Instead: Needs an interval below 0 of both models. Of the vision model it is; of the
    GPT five seeds do not decide and put it at half of the values' to a little above.
    What the paper draws as feed-forward are weights of the second norm, by its
    notebook.
    """
    return _small(evidence, "FF")


@judged_by("curvature", PETROV, "Figs 3–5, on trained models")
def values_dominate_queries(evidence: Evidence) -> Found:
    """ln of ‖H‖ of the queries' and keys' weights over that of the values, at the end.

    Claim: The Value–Value block is the largest of attention after training.

    Instead: Refuted by an interval that reaches 0, of queries or keys in either model.
    At this input scale it is so; ``which_block_is_largest_depends_on_the_input`` shows
    where it is not.
    """
    return _small(evidence, "Q", "K")


def _small(evidence: Evidence, *groups: str) -> Found:
    """Judge ‖H‖ of groups under ‖H‖ of the values, each model by itself."""
    found = {}
    for kind, group in itertools.product(("vit", "gpt"), groups):
        ours, top = (
            [logarithm(v) for v in values(evidence, f"{kind}-1000", f"hessian_{name}")]
            for name in (group, "V")
        )
        found[f"{kind}_ln_{group}_over_values"] = paired(ours, top)
    return pattern(all(one.high < 0 for one in found.values()), **found)


@judged_by("curvature", PETROV, "Fig. 5, growth")
def curvature_of_attention_grows(evidence: Evidence) -> Found:
    """ln of ‖H‖ after training over ‖H‖ at the start: queries, keys, values.

    Claim: All blocks' Hessian norms grow in training.

    Instead: Needs an interval above 0 of queries, keys and values in both models.
    """
    found = {}
    for kind, group in itertools.product(("vit", "gpt"), "QKV"):
        end, start = (
            [logarithm(v) for v in values(evidence, f"{kind}-{at}", f"hessian_{group}")]
            for at in (1000, 0)
        )
        found[f"{kind}_{group}"] = paired(end, start)
    return pattern(all(one.low > 0 for one in found.values()), **found)


@judged_by("convergence", PETROV, "Fig. 6, Thm 7")
def slope_tells_curvature(evidence: Evidence) -> Found:
    """Slope of |L_{k+1} − L_k| at the weights, minus that of i.i.d. numbers.

    Claim: The slope −1 comes from curvature.

    Instead: The claim needs a slope whose whole interval differs from the null's by
    0.05 or more.
    """
    at, null = (over_arms(evidence, name) for name in ("slope_at", "slope_null"))
    found = paired(at, null)
    return pattern(found.low > 0.05 or found.high < -0.05, minus_null=found)


@judged_by("convergence", PETROV, "§ scaling implications", "recommendation")
def model_before_data(evidence: Evidence) -> Found:
    """Held-out loss with four times the model minus with four times the data.

    Claim: Where curvature is stationary, grow the model rather than the data.

    Instead: Refuted by an interval that reaches 0 or lies above it.

    Practice: Nothing here says to grow the model rather than the data.
    """
    found: PairedDifference = contrast(
        evidence, "validation", ("gpt-32-1x", "gpt-16-4x")
    )
    return pattern(found.high < 0, model_minus_data=found)


@judged_by("fragility", BAEK_V1, "Exp. 1, within a format")
def v1_tracks_the_error(evidence: Evidence) -> Found:
    """log-correlation of v1's predictor with the measured error, per seed.

    Claim: The predictor tracks the forward error.

    Instead: Refuted by an interval over seeds that does not stay above 0.5. Within a
    format it does not even have the sign.
    """
    return _tracks(evidence, 6)


@judged_by("fragility", BAEK_V2, "E2, within a format")
def v2_tracks_the_error(evidence: Evidence) -> Found:
    """log-correlation of v2's risk with the measured error, per seed.

    Claim: Scaled risk and mismatch are positively correlated in every run.

    Instead: Refuted by an interval over seeds that does not stay above 0.5. Their
    windows vary in text, ours in models and steps.
    """
    return _tracks(evidence, 7)


def _tracks(evidence: Evidence, column: int) -> Found:
    """Judge a predictor's log-correlation, the mean of fp16 and bf16, over seeds."""
    rows = [row for listed in evidence.curves["tracking"].values() for row in listed]

    def of(seed: int, predictor: int) -> float:
        by_format = (
            [(r[4], r[predictor]) for r in rows if r[0] == seed and r[2] == name]
            for name in ("fp16", "bf16")
        )
        return statistics.fmean(map(_log_correlation, by_format))

    found, beside = (
        paired(
            [of(seed, which) for seed in evidence.seeds], [0.0] * len(evidence.seeds)
        )
        for which in (column, 5)
    )
    return pattern(found.low > 0.5, log_correlation=found, ours=beside)


def _log_correlation(pairs: list[tuple[float, float]]) -> float:
    logs = [(logarithm(a), logarithm(b)) for a, b in pairs]
    with np.errstate(invalid="ignore"):  # of nothing there is none
        return float(np.corrcoef(np.array(logs).T)[0, 1])


@judged_by("fragility", BAEK_V1, "Exp. 3, tail loss")
def epsilon_rule_lowers_the_loss(evidence: Evidence) -> Found:
    """Tail loss with the published ε rule minus doing nothing, paired seeds.

    Claim: The intervention improves the tail loss by about 0.010.

    Instead: Refuted by an interval that reaches 0: the rule never acts.
    """
    return _policy(evidence, "published rule", "tail_loss")


@judged_by("fragility", BAEK_V2, "E5, worst mismatch")
def bgss_lowers_the_worst_error(evidence: Evidence) -> Found:
    """Worst fp16 error with BGSS minus doing nothing, paired seeds.

    Claim: BGSS lowers the worst mismatch.

    Instead: Refuted by an interval that reaches 0. Here the worst error comes before
    the controller may act.
    """
    return _policy(evidence, "BGSS", "worst_mismatch")


def _policy(evidence: Evidence, name: str, measure: str) -> Found:
    """Judge a measure with a policy minus doing nothing, and count its actions."""
    control = evidence.curves["control"]
    acted = [float(run["actions"]) for run in control[name]]
    ends = ([run[measure] for run in control[n]] for n in (name, "nothing"))
    found = paired(*ends, digits=evidence.digits)
    verdict, numbers = pattern(found.high < 0, minus_nothing=found)
    return verdict, {**numbers, "actions a run": sum(acted) / len(acted)}
