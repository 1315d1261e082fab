"""What to set for training itself: warm-up, and the normalisers' floor ε."""

import math
from collections.abc import Iterator

from equipoise.numerics.formats import FORMATS, Format
from equipoise.numerics.scaling import deepnorm
from equipoise.planning.depth import EMADI
from equipoise.planning.model import NORMS, Model
from equipoise.planning.settings import Setting


def warmup_of(model: Model) -> Iterator[Setting]:
    post = model.residual == "post"
    yield Setting(
        name="warmup.steps",
        value=math.ceil(round(2 / (1 - model.beta2), 6)),
        formula=f"2/(1-β₂), β₂ = {model.beta2:g}",
        reference="Ma and Yarats 2021",
        note="at least; post-LN needs it most (Xiong et al. 2020)"
        if post
        else "at least",
    )
    if model.warmup == "temperature":
        yield _temperature(model)


def _temperature(model: Model) -> Setting:
    """τ such that (θ/τ)·Π norms starts at 1/N or below."""
    product = 1.0
    if model.residual.startswith("deepnorm"):
        product = deepnorm(model.depth).branch * deepnorm(model.depth).gain ** 2
    return Setting(
        name="warmup.temperature",
        value=max(1.0, model.depth * product),
        formula="τ from max(1, N·Π gains) down to 1",
        reference=f"ours, after {EMADI}",
        note="(θ/τ)·Π norms starts at 1/N; predicted to replace the learning-rate "
        "warm-up, published without a run",
    )


def epsilon(model: Model) -> Iterator[Setting]:
    usual = NORMS[model.norm]
    # tf32 is an input format of matrix products; everything else there is fp32.
    format = FORMATS["fp32" if model.precision == "tf32" else model.precision]
    value = max(usual, 10.0 ** math.ceil(math.log10(format.smallest_normal)))
    yield Setting(
        name="norm.eps",
        value=value,
        formula=f"≥ smallest normal {format.name}, {format.smallest_normal:.3g}",
        reference="IEEE 754; ours",
        note=_stored_note(usual, format),
    )


def _stored_note(usual: float, format: Format) -> str:
    kept, lost = stored(usual, format), stored(1e-8, format)
    if usual >= format.smallest_normal:
        return ""
    return (
        f"{usual:g} is subnormal in {format.name} (stored as {kept:.6g}) and 1e-8 is "
        f"stored as {lost:.3g}; with normalisers in fp32 keep {usual:g}"
    )


def stored(value: float, format: Format) -> float:
    """Return a positive number as a format keeps it, subnormals included.

    >>> stored(1e-8, FORMATS["fp16"]), f"{stored(1e-5, FORMATS['fp16']):.6g}"
    (0.0, '1.00136e-05')
    """
    exponent = max(math.frexp(value)[1], math.frexp(format.smallest_normal)[1])
    unit = math.ldexp(1.0, exponent - format.significand)
    return round(value / unit) * unit
