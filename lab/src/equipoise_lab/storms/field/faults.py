"""What goes wrong in a failing unit, from a step on, and what would be right to name.

A fault changes the training as a mistake of a script, its settings or its data does. A
cause is right if it is of the fault's family; which family a code belongs to is
declared here, before anything is judged.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise_lab.storms.field.architectures import Part

Family = Literal[
    "rate", "decay", "data", "precision", "optimiser", "start", "attention", "weights"
]


@dataclass(slots=True, kw_only=True)
class Training:
    """What a fault may change: it is handed over before every step."""

    model: nn.Module
    optimisers: list[Optimizer]
    onset: int
    severity: float
    """From 0 to 1."""
    vocabulary: int
    rng: torch.Generator
    """The fault's own: the run's generators stay as the twin has them."""
    rate_factor: float = 1.0
    """Multiplies the schedule's rate of this step."""


Change = Callable[[Training, int], None]
DataChange = Callable[[Training, int, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One way to fail."""

    name: str
    part: Part
    family: Family
    also: tuple[Family, ...] = ()
    """Families that are as right: weights that are multiplied are weights."""
    needs: str = ""
    """A setting of the optimiser without which the fault changes nothing."""
    at_start: bool = False
    """Whether it is there from the first step, not from a random one."""
    prepare: Callable[[Training], None] | None = None
    """Done once, before the first step."""
    before: Change | None = None
    """Done before each step from the onset on."""
    gradients: Change | None = None
    """Done to the gradients of each step from the onset on."""
    data: DataChange | None = None
    """Done to each batch from the onset on."""


FAULTS: dict[str, Fault] = {}


def names(part: Part) -> list[str]:
    return [name for name, one in FAULTS.items() if one.part == part]


def _list(name: str, part: Part, family: Family, **what: Any) -> None:
    FAULTS[name] = Fault(name=name, part=part, family=family, **what)


def _between(low: float, high: float, severity: float) -> float:
    return math.exp(math.log(low) + severity * (math.log(high) - math.log(low)))


def _rate_high(t: Training, step: int) -> None:
    t.rate_factor = _between(15, 150, t.severity)


def _rate_ramp(t: Training, step: int) -> None:
    pace = 1.03 + 0.05 * t.severity
    t.rate_factor = min(1e5, pace ** (step - t.onset))


def _set(t: Training, **settings: float) -> None:
    for optimiser in t.optimisers:
        for group in optimiser.param_groups:
            for name, value in settings.items():
                if name in group:
                    group[name] = value


def _decay(t: Training, step: int) -> None:
    _set(t, weight_decay=_between(20, 100, t.severity))


def _betas(t: Training, step: int) -> None:
    for optimiser in t.optimisers:
        for group in optimiser.param_groups:
            if "betas" in group:
                group["betas"] = (group["betas"][0], 0.3)


def _epsilon(t: Training, step: int) -> None:
    _set(t, eps=_between(0.1, 10.0, t.severity))


def _momentum(t: Training, step: int) -> None:
    for optimiser in t.optimisers:
        for group in optimiser.param_groups:
            if "betas" in group:
                group["betas"] = (0.9995, group["betas"][1])


def _scaled(t: Training, words: tuple[str, ...], factor: float) -> None:
    with torch.no_grad():
        for name, p in t.model.named_parameters():
            if any(word in name for word in words) and p.ndim >= 2:
                p.mul_(factor)


QK = (
    *("q_proj", "k_proj", "query", "key", "c_q", "c_k", "c_attn", "in_proj", "qkv"),
    *("q_b_proj", "kv_b_proj", "q.weight", "k.weight"),
)
OUT = (
    *("o_proj", "out_proj", "c_proj", "dense_4h_to_h", "down_proj", "fc2", "w2"),
    *("output.dense", "linear2", "narrow", "mixed", "wo", ".o.weight", "Wo"),
)


def _qk_growth(t: Training, step: int) -> None:
    _scaled(t, QK, 1.03 + 0.05 * t.severity)


def _out_growth(t: Training, step: int) -> None:
    _scaled(t, OUT, 1.02 + 0.04 * t.severity)


def _gain_growth(t: Training, step: int) -> None:
    factor = 1.02 + 0.04 * t.severity
    with torch.no_grad():
        for p in t.model.parameters():
            if p.ndim == 1 and float(p.mean()) > 0.3:
                p.mul_(factor)


def _init_scale(t: Training) -> None:
    factor = _between(6, 25, t.severity)
    with torch.no_grad():
        for p in t.model.parameters():
            if p.ndim >= 2:
                p.mul_(factor)


def _table_scale(t: Training) -> None:
    factor = _between(30, 300, t.severity)
    with torch.no_grad():
        for module in t.model.modules():
            if isinstance(module, nn.Embedding):
                module.weight.mul_(factor)


def _bf16(t: Training) -> None:
    t.model.to(torch.bfloat16)


def _rounded(t: Training, step: int) -> None:
    """Weights are kept with four bits after the point, as a coarse format does."""
    with torch.no_grad():
        for p in t.model.parameters():
            mantissa, exponent = torch.frexp(p)
            p.copy_(torch.ldexp((mantissa * 16).round() / 16, exponent))


def _random_labels(
    t: Training, step: int, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    wrong = torch.randint(t.vocabulary, y.shape, generator=t.rng)
    return x, torch.where(y >= 0, wrong, y)


def _bad_batches(t: Training, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """More than every second batch is noise."""
    if torch.rand((), generator=t.rng) < 0.4:
        return x, y
    if x.dtype.is_floating_point:
        return 10 * torch.randn(x.shape, generator=t.rng), y
    return torch.randint(t.vocabulary, x.shape, generator=t.rng), y


def _shifted_labels(
    t: Training, step: int, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """Targets belong to the next row of the batch."""
    return x, y.roll(1, 0)


def _one_label(t: Training, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, torch.where(y >= 0, torch.zeros_like(y), y)


def _wiped_inputs(
    t: Training, step: int, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(x), y


def _gradients(t: Training, factor: float) -> None:
    for p in t.model.parameters():
        if p.grad is not None:
            p.grad.mul_(factor)


def _ascent(t: Training, step: int) -> None:
    _gradients(t, -1.0)


def _noise(t: Training, step: int) -> None:
    """Gradients drown in noise of many times their size, as a broken exchange makes."""
    scale = _between(30, 300, t.severity)
    for p in t.model.parameters():
        if p.grad is not None:
            rms = p.grad.square().mean().sqrt()
            noise = torch.randn(p.grad.shape, generator=t.rng).to(p.grad)
            p.grad.add_(scale * rms * noise)


def _jump(t: Training, step: int) -> None:
    t.rate_factor = _between(40, 400, t.severity) if step < t.onset + 40 else 1.0


def _decay_ramp(t: Training, step: int) -> None:
    _set(t, weight_decay=min(200.0, 1.05 ** (step - t.onset)))


def _v_growth(t: Training, step: int) -> None:
    words = ("v_proj", "value", "c_v", "v.weight", "in_proj", "qkv", "Wqkv")
    _scaled(t, words, 1.03 + 0.04 * t.severity)


def _stale(t: Training, step: int) -> None:
    """The second moments are lost before every step, the first are kept."""
    for optimiser in t.optimisers:
        for state in optimiser.state.values():
            for name in ("exp_avg_sq", "max_exp_avg_sq", "exp_inf"):
                if name in state:
                    state[name].mul_(1e-6)


_list("rate high", "open", "rate", at_start=True, before=_rate_high)
_list("rate jump", "open", "rate", before=_rate_high)
_list("rate ramp", "open", "rate", before=_rate_ramp)
_list("decay 30", "open", "decay", before=_decay)
_list("random labels", "open", "data", data=_random_labels)
_list("bad batches", "open", "data", data=_bad_batches)
_list("bf16 weights", "open", "precision", at_start=True, prepare=_bf16)
_list("qk growth", "open", "attention", also=("weights",), before=_qk_growth)
_list("out growth", "open", "weights", before=_out_growth)
_list("beta2 .3", "open", "optimiser", needs="betas", before=_betas)
_list("epsilon", "open", "optimiser", needs="betas", before=_epsilon)
_list("init scale", "open", "start", at_start=True, prepare=_init_scale)
_list("ascent", "open", "optimiser", gradients=_ascent)
_list("noisy gradients", "open", "optimiser", gradients=_noise)

_list("short jump", "locked", "rate", before=_jump)
_list("decay ramp", "locked", "decay", before=_decay_ramp)
_list("momentum", "locked", "optimiser", needs="betas", before=_momentum)
_list("rounded weights", "locked", "precision", before=_rounded)
_list("gain growth", "locked", "weights", before=_gain_growth)
_list("value growth", "locked", "weights", before=_v_growth)
_list("shifted labels", "locked", "data", data=_shifted_labels)
_list("one label", "locked", "data", data=_one_label)
_list("wiped inputs", "locked", "data", data=_wiped_inputs)
_list("table scale", "locked", "start", at_start=True, prepare=_table_scale)
_list("lost moments", "locked", "optimiser", needs="betas", before=_stale)

CLAIMS: dict[str, Family | None] = {
    "setting.grew:learning_rate": "rate",
    "setting.grew:weight_decay": "decay",
    "setting.moved:weight_decay": "decay",
    "setting.grew:epsilon": "optimiser",
    "setting.moved:beta1": "optimiser",
    "setting.moved:beta2": "optimiser",
    "setting.moved:momentum": "optimiser",
    "update.too_large": "rate",
    "curvature.beyond_edge": "rate",
    "loss.jumped": "data",
    "attention.projections_large": "start",
    "residual.embedding_large": "start",
    "update.too_small": "optimiser",
    "update.lost": "precision",
    "precision.error": "precision",
    "update.unexplained": "weights",
    "attention.logits_large": "attention",
    "attention.logits_growing": "attention",
}
"""Code, and of a setting which, → the family it says is at fault; others state a fact.
"""
OF_CHECKS: dict[str, Family] = {
    "check.loss": "data",
    "check.labels": "data",
    "check.same_batch": "data",
}
"""Beginning of a check's code → the family it names; the rest of them state facts."""
