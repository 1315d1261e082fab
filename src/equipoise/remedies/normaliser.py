"""Another normaliser in the place of softmax: swapped in, learnt, and undone.

Axes, in this file:  B batch · H head · Q query · K key · D head channel.

While an attention module runs its forward, and only then, softmax over its scores uses
the other normaliser. Parameters that are learnt belong to the model, not to the
optimiser, until the user says so::

    undo = NormaliserSwap(to="sink", learn=True).apply(model)
    optimiser.add_param_group({"params": learnt_parameters(model), "weight_decay": 0})
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy.discovery import anatomy_of
from equipoise.anatomy.masks import masked_to_infinity
from equipoise.anatomy.operations import LOG_SOFTMAXES, SOFTMAXES, Function
from equipoise.anatomy.sdpa import OpenAttention, WrittenOut
from equipoise.anatomy.sites import AttentionSite
from equipoise.errors import InputError
from equipoise.remedies.base import Undo
from equipoise.remedies.normaliser_module import Weigher

Weigh = Callable[[Tensor], Tensor]


class Weighing(OpenAttention):
    """While active, softmax over the last axis and fused attention use ``weigh``.

    Everything else of the model stays its own: scale, soft-cap, position bias, mask,
    dropout. Fused attention is written out, so it costs memory for its scores.
    """

    def __init__(self, weigh: Weigh) -> None:
        super().__init__()
        self.weigh = weigh
        self.heard = 0
        self.attention = WrittenOut(weigh=self.softmax)

    def call(
        self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if func in SOFTMAXES - LOG_SOFTMAXES and _over_keys(*args, **kwargs):
            return self.softmax(*args, **kwargs)
        return func(*args, **kwargs)

    def softmax(
        self, input: Tensor, dim: int | None = None, *more: Any, **options: Any
    ) -> Tensor:
        """Return the weights of scores whose hidden keys may be large and negative."""
        self.heard += 1
        dtype = next((x for x in more if isinstance(x, torch.dtype)), None)
        z = input.to(options.get("dtype") or dtype or input.dtype)
        return self.weigh(masked_to_infinity(z))


def _over_keys(
    input: Tensor, dim: int | None = None, *more: Any, **options: Any
) -> bool:
    """Return whether a softmax looks like attention's: last axis, rows of queries."""
    return dim in (-1, input.ndim - 1) and input.ndim >= 3


SEAT = "normaliser"
"""The attribute under which an attention module keeps its weigher."""
# Implementations of Hugging Face models in which the scores can be reached.
READABLE = {None, "eager", "sdpa"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NormaliserSwap:
    """Weigh with another normaliser in every attention module, or in some.

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

    def __post_init__(self) -> None:
        Weigher(self.to, heads=1 if self.learn else None)

    def apply(self, model: nn.Module) -> Undo:
        """Swap now; calling the result restores the model bit for bit."""
        _refuse_what_hides(model)
        sites = _chosen(model, self.only)
        weighers = [
            Weigher(self.to, heads=_heads(s) if self.learn else None) for s in sites
        ]
        undos = [_seated(s, w) for s, w in zip(sites, weighers, strict=True)]

        def undo() -> None:
            while undos:
                undos.pop()()

        return undo


def learnt_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return what swapped normalisers learn, for the optimiser; no decay belongs here.

    >>> from equipoise.lab.models import GPT, GPTConfig
    >>> model = GPT(GPTConfig(depth=2, heads=4))
    >>> undo = NormaliserSwap(to="entmax", learn=True).apply(model)
    >>> [tuple(p.shape) for p in learnt_parameters(model)]
    [(4,), (4,)]
    >>> undo(); learnt_parameters(model)
    []
    """
    weighers = [m for m in model.modules() if isinstance(m, Weigher)]
    return [p for weigher in weighers for p in weigher.parameters()]


def _refuse_what_hides(model: nn.Module) -> None:
    if type(model).__name__ == "OptimizedModule":
        raise InputError(
            "this model is compiled: swap the normaliser first, then compile"
        )
    config: Any = getattr(model, "config", None)
    running = getattr(config, "_attn_implementation", None)
    if running not in READABLE:
        raise InputError(
            f"{type(model).__name__} runs {running} attention, which shows no scores; "
            "load it with attn_implementation='eager' (or 'sdpa')"
        )


def _chosen(model: nn.Module, only: tuple[str, ...]) -> list[AttentionSite]:
    sites: Mapping[str, AttentionSite] = {
        s.name: s for s in anatomy_of(model).attention
    }
    if not sites:
        raise InputError(
            f"{type(model).__name__} has no attention we know; declare it "
            "(docs/families.md)"
        )
    unknown = sorted(set(only) - set(sites))
    if unknown:
        raise InputError(
            f"no attention called {', '.join(unknown)}; there are {', '.join(sites)}"
        )
    return [sites[name] for name in only] if only else list(sites.values())


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


def _seated(site: AttentionSite, weigher: Weigher) -> Undo:
    """Give the module its weigher; return how to take it back."""
    module = site.module
    device = next((p.device for p in module.parameters()), None)
    weigher.to(device)
    if hasattr(module, SEAT):
        return _exchanged(module, weigher)
    module.add_module(SEAT, weigher)
    handles = _listening(module, Seat(site.name))

    def undo() -> None:
        for handle in handles:
            handle.remove()
        del module._modules[SEAT]

    return undo


def _exchanged(module: nn.Module, weigher: Weigher) -> Undo:
    """Use the place a module offers, as our lab's attention does."""
    before = getattr(module, SEAT)
    setattr(module, SEAT, weigher)

    def undo() -> None:
        delattr(module, SEAT)
        setattr(module, SEAT, before)

    return undo


def _listening(module: nn.Module, seat: "Seat") -> list[RemovableHandle]:
    return [
        module.register_forward_pre_hook(seat.enter),
        module.register_forward_hook(seat.leave, always_call=True),
    ]


@dataclass(slots=True)
class Seat:
    """Keeps the weigher in force while its module runs, and not a moment longer.

    It holds no module: a deep copy of the model swaps in the copy.
    """

    site: str
    open: list[Weighing] = field(default_factory=list)

    def enter(self, module: nn.Module, args: Any) -> None:
        weighing = Weighing(getattr(module, SEAT))
        weighing.__enter__()  # type: ignore[no-untyped-call]
        self.open.append(weighing)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        weighing = self.open.pop()
        weighing.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if output is not None and not weighing.heard:
            raise InputError(
                f"{self.site} made no softmax over scores and no fused attention that "
                "could be replaced; write its attention out, or leave it out with only="
            )
