"""The paper's numbers beside ours, and whether the pattern holds at our scale."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from equipoise.lab.results import Row

Means = dict[str, dict[str, float]]
"""arm → measure → mean over seeds."""


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """One published statement about pre-LN and post-LN."""

    where: str
    says: str
    measure: str
    holds: Callable[[float, float], bool]
    """Of the means of pre and post."""


EMADI = (
    Pattern(
        where="Table 1",
        says="loss 51.45 < 61.15 (inferred: 3.216 < 3.822 nats)",
        measure="validation",
        holds=lambda pre, post: pre < post,
    ),
    Pattern(
        where="Table 1",
        says="spikes 0 and 0.3 ± 0.5",
        measure="spikes",
        holds=lambda pre, post: pre <= post,
    ),
    Pattern(
        where="Fig. 1",
        says="post-LN vanishes in layers 1–30, pre-LN does not",
        measure="gradient_least_to_last",
        holds=lambda pre, post: post < 1e-3 and pre > 1e-1,
    ),
    Pattern(
        where="Fig. 2",
        says="G grows in training",
        measure="growth_G",
        holds=lambda pre, post: pre > 0 and post > 0,
    ),
    Pattern(
        where="Fig. 4",
        says="θ/τ = 1.000 throughout (here: 5th percentile of rows)",
        measure="theta_p5",
        holds=lambda pre, post: min(pre, post) > 0.9995,
    ),
    Pattern(
        where="Fig. 5",
        says="S, residual stream: ~1e5 for pre, ~1e3 for post",
        measure="S_residual",
        holds=lambda pre, post: pre > 10 * post,
    ),
    Pattern(
        where="Fig. 5",
        says="CV of S over layers .97 and .40",
        measure="S_residual_cv",
        holds=lambda pre, post: pre > post,
    ),
    Pattern(
        where="Fig. 6",
        says="S grows with depth in pre-LN, flat in post-LN",
        measure="S_residual_slope",
        holds=lambda pre, post: pre > 1 and abs(post) < pre,
    ),
    Pattern(
        where="E.6",
        says="Δ ln G 1.29 and 1.13",
        measure="growth_G",
        holds=lambda pre, post: pre > post > 0,
    ),
    Pattern(
        where="E.6",
        says="Δ ln B̄² 2.91 and about 0",
        measure="growth_B2",
        holds=lambda pre, post: pre > 10 * abs(post),
    ),
)


def beside(rows: Sequence[Row]) -> list[tuple[str, str, str, str]]:
    """Return (where, the paper, ours, verdict) for what was measured."""
    means: Means = {
        row.arm: {name: found.mean for name, found in row.values.items()}
        for row in rows
    }
    pre, post = means.get("pre", {}), means.get("post", {})
    return [
        _line(pattern, pre[pattern.measure], post[pattern.measure])
        for pattern in EMADI
        if pattern.measure in pre and pattern.measure in post
    ]


def _line(pattern: Pattern, pre: float, post: float) -> tuple[str, str, str, str]:
    verdict = "holds" if pattern.holds(pre, post) else "does not hold here"
    return pattern.where, pattern.says, f"{pre:.4g} and {post:.4g}", verdict
