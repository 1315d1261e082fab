"""How each quantity is shown: its title, unit, scale, group, and which side is bad."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from equipoise.judging.rules import RULES
from equipoise.records import Finding

Scale = Literal["linear", "log", "auto"]
"""``auto``: logarithmic where the values span decades."""
Worse = Literal["high", "low", ""]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantityLabel:
    """The presentation of one quantity."""

    name: str
    title: str
    unit: str = ""
    scale: Scale = "linear"
    worse: Worse = ""
    """The side on which a run breaks; empty where neither is bad by itself."""
    group: str = "other"
    rank: int = 99
    """The place in lists: what decides most often comes first."""


def _entry(line: str) -> tuple[str, QuantityLabel]:
    name, title, unit, scale, worse, group = (part.strip() for part in line.split("|"))
    kinds: dict[str, Scale] = {"log": "log", "linear": "linear", "auto": "auto"}
    sides: dict[str, Worse] = {"high": "high", "low": "low", "": ""}
    return name, QuantityLabel(
        name=name,
        title=title,
        unit=unit,
        scale=kinds[scale],
        worse=sides[worse],
        group=group,
    )


_TABLE = """
loss | Loss | nats | linear | high | training
gradient.norm | Gradient norm | ‖∂loss/∂w‖ | log | low | gradients
attention.theta.p5 | θ, 5th percentile of rows | θ, 0 to 1 | auto | low | attention
attention.max_logit | Largest attention logit | logit | log | high | attention
attention.entropy | Attention entropy | nats | linear | low | attention
residual.token_cosine | Token cosine | cosine | linear | high | hidden states
residual.B | Residual stream, largest token | ‖x‖ | log | high | hidden states
update.ratio | Update ÷ weight | ratio | log | high | optimiser
gradient.norm.total | Gradient norm, whole model | ‖∂loss/∂w‖ | log | high | gradients
learning_rate | Learning rate | | log | | training
optimizer.weight_decay | Weight decay | | log | | optimiser
optimizer.momentum | Momentum | | linear | | optimiser
optimizer.beta1 | β₁ of the optimiser | | linear | | optimiser
optimizer.beta2 | β₂ of the optimiser | | linear | | optimiser
optimizer.epsilon | ε of the optimiser | | log | | optimiser
loop.batch_size | Sequences in a step | | log | | training
loop.clipping_limit | Norm that gradients are clipped at | | log | | training
loop.loss_scale | Loss scale | | log | | training
router.load | Router load of experts | share | linear | high | router
router.entropy | Router entropy | nats | linear | low | router
router.max_violation | Largest over mean expert load, less 1 | | linear | high | router
router.dropped | Tokens that no expert took | share | linear | high | router
router.tokens | Assignments of tokens to experts | | linear | | router
router.bias | Balancing bias of experts | | linear | | router
mixer.forgets | Tokens at which a mixer keeps nothing | share | linear | high | mixer
mixer.lasts | Tokens whose trace outlasts the sequence | share | linear | | mixer
mixer.write | How much a mixer writes, β | share | linear | low | mixer
mixer.closed | Tokens that a mixer does not write | share | linear | high | mixer
mixer.step | Step Δ of a mixer | | log | | mixer
mixer.log_rate | Largest logarithm of a decay rate | | linear | high | mixer
sensitivity.S | Sensitivity S | gain | log | high | sensitivity
sensitivity | Sensitivity | gain | log | high | sensitivity
precision.rms_error.bf16 | Error in bf16 | relative | log | high | precision
attention.theta.p50 | θ, median row | θ, 0 to 1 | auto | low | attention
attention.theta.p100 | θ, largest row | θ, 0 to 1 | auto | low | attention
attention.theta | θ | θ, 0 to 1 | auto | low | attention
attention.sink | Attention sink | mass | linear | high | attention
attention.key_mass | Mass left for keys beside a sink | mass | linear | low | attention
attention.sink_logit | Logit of a learned sink | logit | linear | | attention
attention.B | Attention input, largest token | ‖x‖ | log | high | attention
attention.lipschitz | Lipschitz bound of attention | gain | log | high | attention
attention.finite_step | Finite step of a row | ℓ1, 0 to 0.92 | linear | high | attention
attention.rows_left_out | Attention rows left out | rows | linear | | attention
attention.theta.histogram | θ, rows per bin | rows | linear | | attention
residual.kurtosis | Activation kurtosis | | log | high | hidden states
output.logit_max | Largest output logit | logit | log | high | output
output.logit_norm | Output logits, RMS | logit | log | high | output
gradient.qk | Gradient of queries and keys | ‖∂loss/∂w‖ | log | low | gradients
gradient.first_to_last | Gradient, first ÷ last layer | ratio | log | low | gradients
update.unchanged | Weights that did not move | share | linear | high | optimiser
update.norm | Update norm | ‖Δw‖ | log | high | optimiser
weight.norm | Weight norm | ‖w‖ | log | | optimiser
norm.sigma | Norm scale σ | | log | low | norms
norm.gain | Norm gain | gain | log | high | norms
projection.G | Projections, product of norms G | gain | log | high | projections
projection.norm | Spectral norm | ‖W‖₂ | log | high | projections
projection | Projections | gain | log | high | projections
precision | Precision | | log | high | precision
selection | Selection | | linear | | selection
curvature | Curvature | | log | high | curvature
backward | Backward factor | ratio | log | low | gradients
baek_v1 | Baek v1 | | log | high | precision
baek_v2 | Baek v2 | | log | high | precision
"""

MOST = ("router.load",)
"""Shown by the largest of a site: the loads of experts sum to one."""

CATALOGUE = dict(_entry(line) for line in _TABLE.strip().splitlines())
RANKS = {name: rank for rank, name in enumerate(CATALOGUE)}


def shown(name: str) -> QuantityLabel:
    """Return how a quantity is shown; a name that is not known is shown as it is.

    >>> shown("attention.theta.p5").scale, shown("sensitivity.ln_G").title
    ('auto', 'Sensitivity ln G')
    >>> shown("my.own").title
    'my.own'
    """
    rank = RANKS.get(name, len(RANKS))
    if name in CATALOGUE:
        return replace(CATALOGUE[name], rank=rank)
    prefix = _known_prefix(name)
    if prefix is None:
        return QuantityLabel(name=name, title=name, rank=rank)
    family, rest = CATALOGUE[prefix], name[len(prefix) + 1 :]
    scale: Scale = "linear" if rest.startswith("ln_") else family.scale
    title = f"{family.title} {re.sub('[._]', ' ', rest)}"
    return replace(family, name=name, title=title, scale=scale, rank=rank)


def _known_prefix(name: str) -> str | None:
    parts = name.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1))
    return next((prefix for prefix in prefixes if prefix in CATALOGUE), None)


DECISIVE = (
    (r"router|expert", ("router.load", "router.entropy")),
    (r"grad\w*\.(vanish|small|depth|first|dead)|vanish", ("gradient.norm",)),
    (r"grad\w*\.(explo|large|spike)|explo", ("gradient.norm", "gradient.norm.total")),
    (r"theta|saturat", ("attention.theta.p5", "attention.theta.p50")),
    (r"entropy|uniform", ("attention.entropy",)),
    (r"sink", ("attention.sink",)),
    (r"output", ("output.logit_max", "output.logit_norm")),
    (r"logit", ("attention.max_logit", "attention.max_logit.sampled")),
    (r"token|rank|cosine", ("residual.token_cosine",)),
    (r"residual|stream|magnitude", ("residual.B",)),
    (r"kurtosis|outlier", ("residual.kurtosis",)),
    (r"update|ratio", ("update.ratio",)),
    (r"precision|bf16|fp16|fp8", ("precision.rms_error.bf16",)),
    (r"norm|epsilon", ("norm.gain", "norm.sigma.min")),
    (r"curvature|sharpness|edge|learning", ("curvature.edge_ratio", "update.ratio")),
    (r"gradient", ("gradient.norm", "gradient.norm.total")),
    (r"loss|diverg|plateau|spike|nonfinite|progress", ("loss",)),
)
"""What a rule is about → the quantities in which one sees it, the best first."""


def decisive(rule: str, named: str | None, stored: list[str]) -> str | None:
    """Return the quantity that shows what a rule found; None if none is stored.

    >>> decisive("gradient.vanishing", None, ["gradient.norm", "loss"])
    'gradient.norm'
    >>> decisive("mine", "residual.B", ["residual.B", "loss"])
    'residual.B'
    """
    if named in stored:
        return named
    for pattern, names in DECISIVE:
        if re.search(pattern, rule):
            for name in names:
                if name in stored:
                    return name
    return "loss" if "loss" in stored else next(iter(stored), None)


def quantity_of(finding: Finding, stored: Sequence[str]) -> str | None:
    """Return the quantity in which one sees a finding; None if none is stored."""
    read = RULES[finding.code].reads if finding.code in RULES else ()
    wanted = (finding.params.get("quantity"), *read)
    named = next((str(name) for name in wanted if name in stored), None)
    return decisive(finding.code, named, list(stored))
