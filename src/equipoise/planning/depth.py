"""The settings of a plan: gains and residual multipliers for a depth, warm-up, ε."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from equipoise.numerics.formats import FORMATS, Format
from equipoise.numerics.scaling import (
    PATH_LENGTH,
    deepnorm,
    deepnorm_encoder_decoder,
    deepnorm_original,
    initial_std,
    output_gain,
    path_gain,
)
from equipoise.planning.evidence import DEEPNORM, LARGEST_GAIN, TEMPERATURE, WARMUP
from equipoise.planning.model import NORMS, Model, PlanSetting

EMADI = "Emadi 2026, §6"
WANG = "Wang et al. 2022"


def scores(model: Model) -> Iterator[PlanSetting]:
    head = model.width // model.heads
    if model.attention != "linear":
        yield PlanSetting(
            name="attention.scale",
            value=head**-0.5,
            formula=f"d_h^(-1/2), d_h = {head}",
            reference="Vaswani et al. 2017",
        )


def std(model: Model) -> Iterator[PlanSetting]:
    yield PlanSetting(
        name="init.std",
        value=initial_std(model.width),
        formula="0.02·(1280/d)^(1/2)",
        reference="ours: keeps GPT-2's operator norms",
        note="of every matrix, before the gains below",
        evidence="proved",
        because="σ₁ of independent entries is std·(√M + √N): the same at any width",
    )


def feedforward_width(model: Model) -> Iterator[PlanSetting]:
    """Three matrices of a gated net hold what two of a plain one do at 8d/3."""
    gated = model.feedforward == "gated"
    width = 256 * math.ceil(8 * model.width / 3 / 256) if gated else 4 * model.width
    yield PlanSetting(
        name="ffn.width",
        value=float(width),
        formula="8d/3, up to a multiple of 256" if gated else "4d",
        reference="Shazeer 2020" if gated else "Vaswani et al. 2017",
        note="as many parameters as a plain net of width 4d" if gated else "",
        evidence="proved" if gated else "published only",
        because="3·d·8d/3 = 2·d·4d" if gated else "",
    )


def _path(model: Model) -> Iterator[PlanSetting]:
    """m factors of the attention path share 1/N, and so do those of the FFN.

    ``linear`` is φ = elu + 1 with its normaliser: all four maps, m about 3.
    Before the norm (pre) our own experiment contradicts it, and gains stay at 1.
    """
    m = PATH_LENGTH[model.attention]
    throttled = model.warmup == "temperature"
    measured = model.residual == "pre" and not throttled
    shared = path_gain(model.depth, maps=m)
    value = 1.0 if throttled or measured else shared
    formula = "1: the temperature shares 1/N" if throttled else f"N^(-1/{m})"
    for letter in "qvo" if model.attention == "shared" else "qkvo":
        yield PlanSetting(
            name=f"init.gain.{letter}",
            value=value,
            formula=f"1, not N^(-1/{m}) = {shared:.3g}" if measured else formula,
            reference=EMADI,
            note="W_Q = W_K, met twice"
            if model.attention == "shared" and letter == "q"
            else "",
            evidence="contradicted here" if measured else "published only",
            because=_contradiction(model) if measured else "",
        )
    yield _feedforward_gain(model, measured)


def _contradiction(model: Model) -> str:
    found = LARGEST_GAIN[model.attention]
    m = PATH_LENGTH[model.attention]
    return (
        f"docs/results/exponents: the largest gain that trains goes as {found} in "
        f"pre-LN models; N^(-1/{m}) is outside the interval"
    )


def _feedforward_gain(model: Model, measured: bool) -> PlanSetting:
    """A gated net multiplies three maps, a plain one two."""
    maps = 3 if model.feedforward == "gated" else 2
    shared = path_gain(model.depth, maps=maps)
    return PlanSetting(
        name="init.gain.ffn",
        value=1.0 if measured else shared,
        formula=f"1, not N^(-1/{maps}) = {shared:.3g}"
        if measured
        else f"N^(-1/{maps})",
        reference=f"ours: the rule of {EMADI}, for its {maps} maps",
        evidence="contradicted here" if measured else "published only",
        because="the same rule fails for attention: see init.gain.o"
        if measured
        else "",
    )


def _plain(model: Model) -> Iterator[PlanSetting]:
    yield from _path(model)
    yield _multiplier("residual.branch", 1.0, "1", EMADI)
    note = "on W_O and the last FFN matrix only"
    yield _output(model, "init.gain.output", "Radford et al. 2019 (GPT-2)", note=note)


def _post(model: Model) -> Iterator[PlanSetting]:
    yield from _path(model)
    yield _multiplier("residual.branch", 1.0, "1", EMADI)


def _sandwich(model: Model) -> Iterator[PlanSetting]:
    yield from _path(model)
    reference = "ours: 2N branches add up to the variance of one"
    note = "weight of the normaliser after each branch, which undoes W_O's gain"
    yield _output(model, "init.norm.output", reference, note=note)


def _output(model: Model, name: str, reference: str, *, note: str) -> PlanSetting:
    value = output_gain(model.depth)
    found = _multiplier(name, value, "(2N)^(-1/2)", reference)
    return replace(found, note=note)


def _deepnorm(model: Model) -> Iterator[PlanSetting]:
    found = deepnorm(model.depth)
    branch = _multiplier("residual.branch", found.branch, "(2N)^(-1/4)", EMADI)
    yield replace(branch, evidence="measured here", because=DEEPNORM)
    yield from _gains(found.gain, "(8N)^(-1/4)")


def _deepnorm_original(model: Model) -> Iterator[PlanSetting]:
    if model.decoder_depth is None:
        found = deepnorm_original(model.depth)
        skip = _multiplier("residual.skip", found.skip, "(2N)^(1/4)", WANG)
        same = f"{DEEPNORM}; LN(aX + f) is LN(X + f/a) up to ε"
        yield replace(skip, evidence="measured here", because=same)
        yield from _gains(found.gain, "(8N)^(-1/4)")
        return
    encoder, decoder = deepnorm_encoder_decoder(model.depth, model.decoder_depth)
    fitted = "0.81·(N⁴M)^(1/16)"
    yield _multiplier("residual.skip.encoder", encoder.skip, fitted, WANG)
    yield from _gains(encoder.gain, "0.87·(N⁴M)^(-1/16)", ".encoder")
    yield _multiplier("residual.skip.decoder", decoder.skip, "(3M)^(1/4)", WANG)
    yield from _gains(decoder.gain, "(12M)^(-1/4)", ".decoder")


def _gains(gain: float, formula: str, stack: str = "") -> Iterator[PlanSetting]:
    for name in ("v", "o", "ffn"):
        yield PlanSetting(
            name=f"init.gain.{name}{stack}",
            value=gain,
            formula=formula,
            reference=WANG,
            note="W_Q and W_K keep gain 1" if name == "v" else "",
        )


def _multiplier(name: str, value: float, formula: str, reference: str) -> PlanSetting:
    return PlanSetting(name=name, value=value, formula=formula, reference=reference)


PLACEMENTS: dict[str, Callable[[Model], Iterator[PlanSetting]]] = {
    "pre": _plain,
    "post": _post,
    "deepnorm": _deepnorm,
    "deepnorm-original": _deepnorm_original,
    "sandwich": _sandwich,
}


def warmup_of(model: Model) -> Iterator[PlanSetting]:
    post = model.residual == "post"
    yield PlanSetting(
        name="warmup.steps",
        value=math.ceil(round(2 / (1 - model.beta2), 6)),
        formula=f"2/(1-β₂), β₂ = {model.beta2:g}",
        reference="Ma and Yarats 2021",
        note="at least; post-LN needs it most (Xiong et al. 2020)"
        if post
        else "at least",
        because=WARMUP,
    )
    if model.warmup == "temperature":
        yield _temperature(model)


def _temperature(model: Model) -> PlanSetting:
    """τ such that (θ/τ)·Π norms starts at 1/N or below."""
    product = 1.0
    if model.residual.startswith("deepnorm"):
        product = deepnorm(model.depth).branch * deepnorm(model.depth).gain ** 2
    return PlanSetting(
        name="warmup.temperature",
        value=max(1.0, model.depth * product),
        formula="τ from max(1, N·Π gains) down to 1",
        reference=f"ours, after {EMADI}",
        note="(θ/τ)·Π norms starts at 1/N; predicted to replace the learning-rate "
        "warm-up, published without a run",
        evidence="contradicted here",
        because=TEMPERATURE,
    )


def epsilon(model: Model) -> Iterator[PlanSetting]:
    usual = NORMS[model.norm]
    # tf32 is an input format of matrix products; everything else there is fp32.
    format = FORMATS["fp32" if model.precision == "tf32" else model.precision]
    value = max(usual, 10.0 ** math.ceil(math.log10(format.smallest_normal)))
    yield PlanSetting(
        name="norm.eps",
        value=value,
        formula=f"≥ smallest normal {format.name}, {format.smallest_normal:.3g}",
        reference="IEEE 754; ours",
        note=_stored_note(usual, format),
        evidence="proved",
        because="a subnormal or zero ε is what the format stores",
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
