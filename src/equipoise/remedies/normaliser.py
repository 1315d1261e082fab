"""Replace softmax by another normaliser: as a module, swapped in, learnt, and undone.

Axes, in this file:  B batch · H head · Q query · K key · D head channel.

While an attention module runs its forward, and only then, softmax over its scores uses
the other normaliser. Parameters that are learnt belong to the model, not to the
optimiser, until the user says so::

    undo = NormaliserSwap(to="sink", learn=True).apply(model)
    optimiser.add_param_group({"params": learnt_parameters(model), "weight_decay": 0})
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy.calls import masked_to_infinity
from equipoise.anatomy.operations import LOG_SOFTMAXES, SOFTMAXES, Function
from equipoise.anatomy.sdpa import OpenAttention, WrittenOut
from equipoise.anatomy.sites import AttentionSite
from equipoise.errors import InputError
from equipoise.numerics.normalisers import NORMALISERS, Normaliser, attention_weights
from equipoise.numerics.normalisers.closed_form import (
    ADAPTIVE,
    AdaptiveTemperature,
    ScalableSoftmax,
    SinkSoftmax,
)
from equipoise.numerics.normalisers.sparse import LEAST_ALPHA, Entmax, ScalableEntmax
from equipoise.remedies.attention_hooks import (
    attention_sites,
    over_keys,
    refuse_hidden_scores,
)
from equipoise.remedies.base import Back, Changes, RecordedRemedy, Undo


@dataclass(frozen=True, slots=True)
class Learnable:
    """Where each parameter of a head starts, and the normaliser they make."""

    start: Mapping[str, float]
    made: Callable[[Mapping[str, Tensor]], Normaliser]


def _alpha(raw_H: Tensor) -> Tensor:
    """Return α between 1.01 and 2, whatever the optimiser does; 1.505 at 0."""
    return LEAST_ALPHA + (2 - LEAST_ALPHA) * torch.sigmoid(raw_H)


_POWERS = [f"c{power}" for power in reversed(range(len(ADAPTIVE)))]
_SOFTPLUS_OF_ONE = math.log(math.expm1(1.0))

LEARNABLE: dict[str, Learnable] = {
    "ssmax": Learnable({"s": 0.43}, lambda p: ScalableSoftmax(p["s"][:, None, None])),
    "entmax": Learnable(
        {"raw_alpha": 0.0}, lambda p: Entmax(_alpha(p["raw_alpha"])[:, None])
    ),
    # β = softplus and γ = 2 tanh as in the paper, but one per head, not per query: the
    # hidden state they would be projected from is not at hand where weights are made.
    "asentmax": Learnable(
        {"raw_beta": _SOFTPLUS_OF_ONE, "raw_gamma": math.atanh(0.5)},
        lambda p: ScalableEntmax(
            beta=nn.functional.softplus(p["raw_beta"])[:, None, None],
            gamma=2 * torch.tanh(p["raw_gamma"])[:, None, None],
        ),
    ),
    "sink": Learnable({"b": 0.0}, lambda p: SinkSoftmax(p["b"][:, None], name="sink")),
    "adaptive-temperature": Learnable(
        dict(zip(_POWERS, ADAPTIVE, strict=True)),
        lambda p: AdaptiveTemperature(tuple(p[c][:, None, None] for c in _POWERS)),
    ),
}
"""What can be learnt, by the normaliser's name."""


class NormaliserModule(nn.Module):
    """Scores in (scaled, hidden keys at -inf), attention weights out.

    >>> NormaliserModule("sparsemax")(torch.tensor([2.0, 0.0, -torch.inf]))
    tensor([1., 0., 0.])
    >>> [name for name, _ in NormaliserModule("sink", heads=4).named_parameters()]
    ['b']
    """

    def __init__(self, name: str, *, heads: int | None = None) -> None:
        """Make one with its default parameters or, given ``heads``, learnt per head."""
        super().__init__()
        if name not in NORMALISERS:
            known = ", ".join(sorted(NORMALISERS))
            raise InputError(f"no normaliser {name!r}; there are {known}")
        if heads is not None and name not in LEARNABLE:
            raise InputError(
                f"{name} has nothing to learn; {', '.join(LEARNABLE)} have"
            )
        self.name, self.heads = name, heads
        self.fixed = NORMALISERS[name]() if heads is None else None
        if heads is not None:
            for key, value in LEARNABLE[name].start.items():
                start_H = torch.full((heads,), value)
                self.register_parameter(key, nn.Parameter(start_H))

    @property
    def normaliser(self) -> Normaliser:
        """Return the normaliser as its parameters stand now."""
        if self.fixed is not None:
            return self.fixed
        return LEARNABLE[self.name].made(dict(self.named_parameters()))

    def forward(self, z_BHQK: Tensor) -> Tensor:
        if self.heads is None:
            return attention_weights(self.normaliser, z_BHQK)
        # torch's own attention folds heads into the batch: (B·H, Q, K).
        folded = z_BHQK.ndim == 3 and z_BHQK.shape[0] % self.heads == 0
        z_BHQK = z_BHQK.unflatten(0, (-1, self.heads)) if folded else z_BHQK
        if z_BHQK.ndim < 3 or z_BHQK.shape[-3] != self.heads:
            raise InputError(
                f"{self.name} learns for {self.heads} heads, but the scores are "
                f"{tuple(z_BHQK.shape)}: give (batch, head, query, key)"
            )
        w_BHQK = attention_weights(self.normaliser, z_BHQK)
        return w_BHQK.flatten(0, 1) if folded else w_BHQK

    def extra_repr(self) -> str:
        return self.name if self.heads is None else f"{self.name}, heads={self.heads}"


class SoftmaxReplacement(OpenAttention):
    """While active, softmax over the last axis and fused attention use ``normalise``.

    Everything else of the model stays its own: scale, soft-cap, position bias, mask,
    dropout. Fused attention is written out, so it costs memory for its scores.
    """

    def __init__(self, normalise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.normalise = normalise
        self.calls = 0
        self.attention = WrittenOut(weigh=self.softmax)

    def call(
        self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if func in SOFTMAXES - LOG_SOFTMAXES and over_keys(*args, **kwargs):
            return self.softmax(*args, **kwargs)
        return func(*args, **kwargs)

    def softmax(
        self, input: Tensor, dim: int | None = None, *more: Any, **options: Any
    ) -> Tensor:
        """Return the weights of scores whose hidden keys may be large and negative."""
        self.calls += 1
        dtype = next((x for x in more if isinstance(x, torch.dtype)), None)
        z = input.to(options.get("dtype") or dtype or input.dtype)
        return self.normalise(masked_to_infinity(z))


ATTRIBUTE = "normaliser"
"""Under which an attention module holds its normaliser module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormaliserSwap(RecordedRemedy):
    """Use another normaliser in every attention module, or in some.

    Works where attention is written out (softmax over scores), and where it calls
    torch's ``scaled_dot_product_attention`` or ``nn.MultiheadAttention``, which are
    then written out. Apply it before ``torch.compile`` and before DDP or FSDP.
    """

    to: str
    """A name in ``equipoise.numerics.normalisers.NORMALISERS``."""
    learn: bool = False
    """Learn its parameters, one set per head."""
    only: tuple[str, ...] = ()
    """Names of attention modules; all of them by default."""
    name: str = "normaliser"

    @property
    def preserves_function(self) -> bool:
        return self.to == "softmax"

    def __post_init__(self) -> None:
        NormaliserModule(self.to, heads=1 if self.learn else None)

    def change(self, changes: Changes) -> Undo:
        refuse_hidden_scores(changes.model)
        sites = attention_sites(changes.model, self.only)
        for site in sites:
            heads = _heads(site) if self.learn else None
            back = _install(site, NormaliserModule(self.to, heads=heads))
            changes.undo_by(back, (id(site.module), ATTRIBUTE))
        return changes.applied(to=self.to, sites=len(sites))


def learnt_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return what swapped normalisers learn, for the optimiser; no decay belongs here.

    >>> model = nn.TransformerEncoderLayer(16, 4, batch_first=True)
    >>> undo = NormaliserSwap(to="entmax", learn=True).apply(model)
    >>> [tuple(p.shape) for p in learnt_parameters(model)]
    [(4,)]
    >>> undo(); learnt_parameters(model)
    []
    """
    swapped = [m for m in model.modules() if isinstance(m, NormaliserModule)]
    return [p for module in swapped for p in module.parameters()]


def _heads(site: AttentionSite) -> int:
    if site.projections is not None:
        return site.projections.heads
    for owner in (site.module, getattr(site.module, "config", None)):
        for attribute in ("num_heads", "num_attention_heads", "n_head"):
            if isinstance(found := getattr(owner, attribute, None), int):
                return found
    raise InputError(
        f"{site.name} does not say how many heads it has: learn=False, or give "
        f"{type(site.module).__name__} an integer num_heads"
    )


def _install(site: AttentionSite, normaliser: NormaliserModule) -> Back:
    """Give an attention module its normaliser; return how to undo it."""
    module = site.module
    device = next((p.device for p in module.parameters()), None)
    normaliser.to(device)
    if hasattr(module, ATTRIBUTE):
        return _exchange(module, normaliser)
    module.add_module(ATTRIBUTE, normaliser)
    hooks = ReplacementHooks(site.name)
    handles: list[RemovableHandle] = [
        module.register_forward_pre_hook(hooks.enter),
        module.register_forward_hook(hooks.leave, always_call=True),
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()
        del module._modules[ATTRIBUTE]

    return undo


def _exchange(module: nn.Module, normaliser: NormaliserModule) -> Back:
    """Set the attribute a module already has, as our lab's attention does."""
    before = getattr(module, ATTRIBUTE)
    setattr(module, ATTRIBUTE, normaliser)

    def undo() -> None:
        delattr(module, ATTRIBUTE)
        setattr(module, ATTRIBUTE, before)

    return undo


@dataclass(slots=True)
class ReplacementHooks:
    """Replace softmax while a module runs its forward, and only then.

    It holds no module: a deep copy of the model swaps in the copy.
    """

    site: str
    active: list[SoftmaxReplacement] = field(default_factory=list)

    def enter(self, module: nn.Module, args: Any) -> None:
        replacement = SoftmaxReplacement(getattr(module, ATTRIBUTE))
        replacement.__enter__()  # type: ignore[no-untyped-call]
        self.active.append(replacement)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        replacement = self.active.pop()
        replacement.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if output is not None and not replacement.calls:
            raise InputError(
                f"{self.site} made no softmax over scores and no fused attention that "
                "could be replaced; write its attention out, or leave it out with only="
            )
