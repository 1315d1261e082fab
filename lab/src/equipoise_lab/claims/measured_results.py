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
    judged_pattern,
)
from equipoise_lab.claims.rules import Parts, above, below, within
from equipoise_lab.results.evidence import Evidence
from equipoise_lab.results.statistics import PairedDifference, paired, power_law


def _of_one_model(parts: Parts, **numbers: float) -> Found:
    named = {name.replace("_", " "): value for name, value in numbers.items()}
    return judged_pattern(parts, named, interval=False)


@judged_by("theorem", EMADI, "Fig. 3")
def brute_force_agrees(evidence: Evidence) -> Found:
    """The largest |θ − τ‖J‖| over rows of 4, 8 and 12 keys at three temperatures.

    Claim: ‖J‖ by brute force over all signs lies on the line θ/τ.

    Rule: No row is off by more than rounding, 1e-9.

    Instead: It does; the heuristic that the paper measures θ with does not (see
    ``greedy_prefix``).
    """
    errors = [v for arm in evidence.runs for v in values(evidence, arm, "theta_error")]
    norms = [v for arm in evidence.runs for v in values(evidence, arm, "norm")]
    worst = max(errors)
    numbers = {"largest error": worst, "seeds": float(len(evidence.seeds))}
    return judged_pattern({"on the line": worst < 1e-9 < min(norms)}, numbers)


@judged_by("selection-paper", MUDARISOV, "Fig. 2a, Algorithm 1")
def distance_grows_linearly(evidence: Evidence) -> Found:
    """Exponent over L of d̃ of the top 5, MiniLM, all heads.

    Claim: d̃ of the N largest weights grows about linearly with L.

    Rule: The exponent lies within 0.8 … 1.2; one model, so at most partly.

    Instead: It does in MiniLM; so would Σ‖y‖.
    """
    one = evidence.curves["lengths"]["d̃"]
    fitted = power_law(one["x"], one["true"])
    parts = {"an exponent of about 1": 0.8 < fitted.exponent < 1.2}
    return _of_one_model(parts, exponent=fitted.exponent)


@judged_by("selection-paper", MUDARISOV, "Fig. 2b, Algorithm 2")
def few_tokens_are_enough(evidence: Evidence) -> Found:
    """d̃ at N = 100 over d̃ at N = 20, and over its expectation.

    Claim: Beyond N = 20 little is gained; by N ≈ 100 true and expected d̃ meet.

    Rule: Two parts, in one model: d̃ changes by less than 25 % from N = 20 to 100;
    d̃/E[d̃] is below 1.2 at N = 100.

    Instead: The first part holds in MiniLM, the second does not.
    """
    one = evidence.curves["sizes"]["d̃"]
    at = {int(n): i for i, n in enumerate(one["x"])}
    change = one["true"][at[100]] / one["true"][at[20]]
    lift = one["true"][at[100]] / one["expected_high"][at[100]]
    parts = {
        "little is gained beyond 20": abs(change - 1) < 0.25,
        "true and expected meet by 100": lift < 1.2,
    }
    return _of_one_model(parts, change_from_20_to_100=change, least_lift_at_100=lift)


@judged_by("selection-paper", MUDARISOV, "Fig. 3, Algorithm 4")
def separability_settles(evidence: Evidence) -> Found:
    """N_s/N from N = 16 on, and of random sets.

    Claim: N_s/N falls until N ≈ 16 and then stays between 0.70 and 0.85.

    Rule: Two parts, in one model: the means over heads from N = 16 on spread by less
    than 0.15; they lie within 0.65 … 0.90.

    Instead: It settles in MiniLM, and lower: dimension decides (see
    ``eighty_percent``).
    """
    one = evidence.curves["separability"]["recall"]
    late = [m for n, m in zip(one["x"], one["mean"], strict=True) if n >= 16]
    parts = {
        "it settles": max(late) - min(late) < 0.15,
        "between 0.70 and 0.85": all(0.65 <= m <= 0.9 for m in late),
    }
    return _of_one_model(parts, least=min(late), largest=max(late))


@judged_by("selection-paper", MUDARISOV, "Fig. 4, Algorithm 5")
def sensitivity_over_temperature(evidence: Evidence) -> Found:
    """g at T = 0.01 over g at T = 0.1, and how far curves of ε are apart from T = 1.

    Claim: Below T = 0.1 sensitivity grows like 1/T; from T = 1 the curves merge.

    Rule: Two parts, in one model: g grows by 5 … 20 from T = 0.1 to 0.01; from T = 1
    the curves are within a factor of 1.5.

    Instead: The curves merge; trained rows saturate before 1/T shows.
    """
    lines = list(evidence.curves["gradient"].values())
    small = dict(zip(lines[0]["x"], lines[0]["y"], strict=True))
    growth = small[0.01] / small[0.1]
    warm = [i for i, T in enumerate(lines[0]["x"]) if T >= 1]
    spread = max(
        max(c["y"][i] for c in lines) / min(c["y"][i] for c in lines) for i in warm
    )
    parts = {"like 1/T below 0.1": 5 < growth < 20, "they merge from 1": spread < 1.5}
    return _of_one_model(parts, growth=growth, spread_from_1=spread)


@judged_by("curvature", PETROV, "Figs 5, 11")
def feedforward_curvature_is_small(evidence: Evidence) -> Found:
    """ln of ‖H‖ of the feed-forward weights over that of the values, at the end.

    Claim: The feed-forward net's curvature is small beside the values'.

    Rule: One part for each model: the interval lies below 0.

    Instead: Of the vision model it is; of the GPT five seeds do not decide and put it
    at half of the values' to a little above. What the paper draws as feed-forward are
    weights of the second norm, by its notebook.
    """
    return _small(evidence, "FF")


@judged_by("curvature", PETROV, "Figs 3–5, on trained models")
def values_dominate_queries(evidence: Evidence) -> Found:
    """ln of ‖H‖ of the queries' and keys' weights over that of the values, at the end.

    Claim: The Value–Value block is the largest of attention after training.

    Rule: Four parts, queries and keys of each model: the interval lies below 0.

    Instead: At this input scale it is so;
    ``which_block_is_largest_depends_on_the_input`` shows where it is not.
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
    parts = {f"{name.replace('_', ' ')} below 0": below(f) for name, f in found.items()}
    return pattern(parts, **found)


@judged_by("curvature", PETROV, "Fig. 5, growth")
def curvature_of_attention_grows(evidence: Evidence) -> Found:
    """ln of ‖H‖ after training over ‖H‖ at the start: queries, keys, values.

    Claim: All blocks' Hessian norms grow in training.

    Rule: Six parts, queries, keys and values of both models: an interval above 0.

    Instead: As stated, in two small models.
    """
    found = {}
    for kind, group in itertools.product(("vit", "gpt"), "QKV"):
        end, start = (
            [logarithm(v) for v in values(evidence, f"{kind}-{at}", f"hessian_{group}")]
            for at in (1000, 0)
        )
        found[f"{kind}_{group}"] = paired(end, start)
    parts = {f"{name.replace('_', ' ')} above 0": above(f) for name, f in found.items()}
    return pattern(parts, **found)


@judged_by("convergence", PETROV, "Fig. 6, Thm 7")
def slope_tells_curvature(evidence: Evidence) -> Found:
    """Slope of |L_{k+1} − L_k| at the weights, minus that of i.i.d. numbers.

    Claim: The slope −1 comes from curvature.

    Rule: The whole interval differs from the null's by 0.05 or more.

    Instead: The null has it too: see ``slope_of_running_means``.
    """
    at, null = (over_arms(evidence, name) for name in ("slope_at", "slope_null"))
    found = paired(at, null)
    inside = within(found, -0.05, 0.05)
    parts = {"away from the null": None if inside is None else not inside}
    return pattern(parts, minus_null=found)


@judged_by("convergence", PETROV, "§ scaling implications", "recommendation")
def model_before_data(evidence: Evidence) -> Found:
    """Held-out loss with four times the model minus with four times the data.

    Claim: Where curvature is stationary, grow the model rather than the data.

    Rule: The interval of model minus data lies below 0.

    Instead: Here more data lowers the loss further.

    Practice: Nothing here says to grow the model rather than the data.
    """
    found: PairedDifference = contrast(
        evidence, "validation", ("gpt-32-1x", "gpt-16-4x")
    )
    return pattern({"model − data below 0": below(found)}, model_minus_data=found)


@judged_by("fragility", BAEK_V1, "Exp. 1, within a format")
def v1_tracks_the_error(evidence: Evidence) -> Found:
    """log-correlation of v1's predictor with the measured error, per seed.

    Claim: The predictor tracks the forward error.

    Rule: The interval over seeds lies above 0.5.

    Instead: Within a format it does not even have the sign.
    """
    return _tracks(evidence, 6)


@judged_by("fragility", BAEK_V2, "E2, within a format")
def v2_tracks_the_error(evidence: Evidence) -> Found:
    """log-correlation of v2's risk with the measured error, per seed.

    Claim: Scaled risk and mismatch are positively correlated in every run.

    Rule: The interval over seeds lies above 0.5.

    Instead: Here it lies below 0. Their windows vary in text, ours in models and steps.
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
    parts = {"log-correlation above 0.5": above(found, 0.5)}
    return pattern(parts, log_correlation=found, ours=beside)


def _log_correlation(pairs: list[tuple[float, float]]) -> float:
    logs = [(logarithm(a), logarithm(b)) for a, b in pairs]
    with np.errstate(invalid="ignore"):  # of nothing there is none
        return float(np.corrcoef(np.array(logs).T)[0, 1])


@judged_by("fragility", BAEK_V1, "Exp. 3, tail loss")
def epsilon_rule_lowers_the_loss(evidence: Evidence) -> Found:
    """Tail loss with the published ε rule minus doing nothing, paired seeds.

    Claim: The intervention improves the tail loss by about 0.010.

    Rule: The interval over paired seeds lies below 0, and the rule acts at all.

    Instead: The rule never acts (see ``intervention_never_fires``): nothing can
    improve.
    """
    return _policy(evidence, "published rule", "tail_loss")


@judged_by("fragility", BAEK_V2, "E5, worst mismatch")
def bgss_lowers_the_worst_error(evidence: Evidence) -> Found:
    """Worst fp16 error with BGSS minus doing nothing, paired seeds.

    Claim: BGSS lowers the worst mismatch.

    Rule: The interval over paired seeds lies below 0. Undecided where no seed's worst
    error differs: the experiment then has no power.

    Instead: Undecided: here the worst error comes before the controller may act, so
    that both arms read the same number.
    """
    return _policy(evidence, "BGSS", "worst_mismatch")


def _policy(evidence: Evidence, name: str, measure: str) -> Found:
    """Judge a measure with a policy minus doing nothing, and count its actions."""
    control = evidence.curves["control"]
    acted = [float(run["actions"]) for run in control[name]]
    ends = [[run[measure] for run in control[n]] for n in (name, "nothing")]
    found = paired(*ends, digits=evidence.digits)
    # No seed differs at all: the arms never met what is measured, and no power to see.
    moved = any(a != b for a, b in zip(*ends, strict=True))
    lower = f"{measure.replace('_', ' ')} lower"
    parts: Parts = {lower: below(found) if moved else None}
    if not moved and not any(acted):
        parts = {"the rule acts": False}
    verdict, numbers = pattern(parts, minus_nothing=found)
    return verdict, {**numbers, "actions a run": sum(acted) / len(acted)}
