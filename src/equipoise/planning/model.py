"""The model a plan is for, with the combinations that were analysed, and the plan."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from equipoise.errors import InputError
from equipoise.numerics.scaling import PATH_LENGTH
from equipoise.planning.evidence import Level
from equipoise.records import html_table

RESIDUALS = ("pre", "post", "deepnorm", "deepnorm-original", "sandwich")
ATTENTIONS = tuple(PATH_LENGTH)
WARMUPS = ("learning-rate", "temperature")
FEEDFORWARDS = ("plain", "gated")
PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16")
NORMS = {"layernorm": 1e-5, "rmsnorm": 1e-6}
"""Normaliser → the ε in common use."""
CHOICES: dict[str, tuple[str, ...]] = {
    "residual": RESIDUALS,
    "attention": ATTENTIONS,
    "norm": tuple(NORMS),
    "precision": PRECISIONS,
    "warmup": WARMUPS,
    "feedforward": FEEDFORWARDS,
}
"""Option → the names it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model a plan is for."""

    depth: int
    """Layers N, each of an attention and a feed-forward branch."""
    width: int
    heads: int
    residual: str = "pre"
    """pre, post, sandwich, deepnorm (LN(X + αf)), deepnorm-original (LN(aX + f))."""
    attention: str = "standard"
    """standard, shared (W_Q = W_K, met twice: m = 4 for both), linear (φ = elu + 1,
    normalised: m = 3, measured)."""
    norm: str = "layernorm"
    precision: str = "bf16"
    """The format the normalisers compute in: under autocast that is fp32."""
    warmup: str = "learning-rate"
    """Of the learning rate, or of the softmax temperature."""
    beta2: float = 0.95
    """Adam's."""
    feedforward: str = "plain"
    """gated: (φ(x W_gate) ⊙ x W_up) W_down, as in Llama (SwiGLU)."""
    decoder_depth: int | None = None
    """Makes it an encoder–decoder whose encoder has ``depth`` layers."""

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            given = getattr(self, name)
            if given not in known:
                names = ", ".join(known)
                raise InputError(f"{name} {given!r} is not known; known: {names}")
        for name in ("depth", "width", "heads"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} {getattr(self, name)}: at least 1 is needed")
        if self.width % self.heads:
            raise InputError(
                f"width {self.width} does not divide into {self.heads} heads"
            )
        if not 0 < self.beta2 < 1:
            raise InputError(f"beta2 {self.beta2}: give a number in (0, 1)")
        self._analysed()

    def _analysed(self) -> None:
        deep = self.residual.startswith("deepnorm")
        if deep and self.attention != "standard":
            raise InputError(
                f"DeepNorm with {self.attention} attention has not been analysed; "
                "known with it: standard. Known for residual pre, post, sandwich: "
                f"{', '.join(ATTENTIONS)}"
            )
        if self.decoder_depth is not None and self.residual != "deepnorm-original":
            raise InputError(
                "encoder–decoder constants are known for residual deepnorm-original "
                f"only (Wang et al. 2022), not for {self.residual}"
            )
        if self.warmup == "temperature" and self.attention == "linear":
            raise InputError(
                "linear attention has no softmax whose temperature could be warmed up; "
                "known for it: warmup learning-rate"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSetting:
    """One thing to set, and why."""

    name: str
    """Dotted: ``init.gain.v``, ``residual.branch``, ``warmup.steps``, ``norm.eps``."""
    value: float
    formula: str
    reference: str
    note: str = ""
    evidence: Level = "published only"
    because: str = ""
    """What the evidence is: an interval and where it is from, or a reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to set for one model; iterate over it, index it by name, or print it."""

    model: Model
    settings: tuple[PlanSetting, ...]

    def __iter__(self) -> Iterator[PlanSetting]:
        return iter(self.settings)

    def __getitem__(self, name: str) -> float:
        for setting in self.settings:
            if setting.name == name:
                return setting.value
        known = ", ".join(setting.name for setting in self.settings)
        raise InputError(f"this plan has no {name}; it has {known}")

    def __str__(self) -> str:
        rows = [
            (s.name, f"{s.value:.6g}", s.formula, s.reference, s.evidence) for s in self
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [(s.name, f"{s.value:.6g}", s.formula, s.reference) for s in self]
        size = f"{self.model.depth} layers of width {self.model.width}"
        return html_table(
            f"Plan for {size}", [("set", "to", "formula", "after"), *rows]
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), allow_nan=False)
