"""Where remedies reach into attention: queries and keys by head, scores, weights.

Axes, in this file:  x any · H head · D head channel · B batch · Q query · K key.

Queries and keys are changed where their projections leave them, before rotation. Scores
are reached while the attention module runs, and only then. ``nn.MultiheadAttention``
hands its weights to one function, which is opened for the length of the call. What a
hook holds is an object, never a closure: a deep copy of the model then has its own.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from equipoise.anatomy.call_stack import Caller
from equipoise.anatomy.calls import masked_to_infinity
from equipoise.anatomy.discovery import anatomy_of
from equipoise.anatomy.operations import FUSED, LOG_SOFTMAXES, SOFTMAXES, Function
from equipoise.anatomy.sdpa import (
    FusedArguments,
    WrittenOut,
    four,
    open_multi_head,
    sdpa_call,
)
from equipoise.anatomy.sharding import local_part, split
from equipoise.anatomy.sites import AttentionSite, Projections, Weight
from equipoise.errors import InputError
from equipoise.remedies.base import Changes

Letter = Literal["q", "k"]
TORCH = "MultiheadAttention"
# Implementations of Hugging Face models in which scores can be reached.
READABLE = {None, "eager", "sdpa"}
OWN_NORMS = (
    *("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_norm", "key_norm"),
    *("q_ln", "k_ln", "qk_norm", "query_layernorm", "key_layernorm"),
)


class HeadEdit(Protocol):
    """Changes queries or keys, one row per head."""

    def __call__(self, letter: Letter, x_xHD: Tensor) -> Tensor: ...


ScoreEdit = Callable[[Tensor], Tensor]


def attention_sites(model: nn.Module, only: Iterable[str] = ()) -> list[AttentionSite]:
    """Return the attention modules by name, or all; an error where there are none."""
    sites = {s.name: s for s in anatomy_of(model).attention}
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


def projections_of(site: AttentionSite) -> Projections:
    """Return a site's projections; an error where they were not found."""
    if site.projections is None:
        raise InputError(
            f"the projections of {site.name} are not known, so its queries and keys "
            "cannot be changed; declare them (docs/families.md)"
        )
    return site.projections


def refuse_own_norm(name: str, site: AttentionSite) -> None:
    """Scaling queries or keys does nothing where the model normalises them after."""
    own = next((n for n, _ in site.module.named_children() if n in OWN_NORMS), None)
    if own is not None:
        raise InputError(
            f"{site.name} normalises queries and keys already ({own}): {name} would "
            "change nothing there"
        )


def refuse_hidden_scores(model: nn.Module) -> None:
    """Flash and flex attention show no scores."""
    running = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if running not in READABLE:
        raise InputError(
            f"{type(model).__name__} runs {running} attention, which shows no scores; "
            "load it with attn_implementation='eager' (or 'sdpa')"
        )


@dataclass(slots=True)
class AttentionHooks:
    """What remedies change inside one attention module while it runs."""

    site: str
    module: nn.Module
    scores: list[ScoreEdit] = field(default_factory=list)
    heads: list[HeadEdit] = field(default_factory=list)
    weights: list[tuple[nn.Parameter, Callable[[Tensor], Tensor]]] = field(
        default_factory=list
    )
    observers: list[Callable[[Tensor], None]] = field(default_factory=list)
    """Called with the largest score of each head, in passes with gradients."""
    running: list["AttentionEdits"] = field(default_factory=list)

    def enter(self, module: nn.Module, args: Any) -> None:
        edits = AttentionEdits(self)
        edits.__enter__()  # type: ignore[no-untyped-call]
        self.running.append(edits)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        edits = self.running.pop()
        edits.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if output is not None and not edits.calls and (self.scores or self.heads):
            raise InputError(
                f"{self.site} made no attention call that a remedy could reach: undo "
                "the remedy, or leave this module out with only="
            )


def hooks_of(changes: Changes, site: AttentionSite) -> AttentionHooks:
    """Return the one object that edits a module, installed if it is not yet."""
    module = site.module
    for hook in module._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, AttentionHooks):
            return owner
    made = AttentionHooks(site.name, module)
    module.register_forward_pre_hook(made.enter)
    module.register_forward_hook(made.leave, always_call=True)
    return made


def add_edit(changes: Changes, site: AttentionSite, kind: str, edit: Any) -> None:
    """Add to one list of a module's edits until it is undone."""
    hooks = hooks_of(changes, site)
    edits: list[Any] = getattr(hooks, kind)
    edits.append(edit)
    changes.undo_by(lambda: _remove(site.module, hooks, edits, edit))


def _remove(
    module: nn.Module, hooks: AttentionHooks, edits: list[Any], edit: Any
) -> None:
    edits[:] = [other for other in edits if other is not edit]
    if hooks.scores or hooks.heads or hooks.weights or hooks.observers:
        return
    for table in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(table.items()):
            if getattr(hook, "__self__", None) is hooks:
                del table[key]
                module._forward_hooks_always_called.pop(key, None)


class AttentionEdits(TorchFunctionMode):
    """Applies the edits to every attention call inside one run of the module."""

    def __init__(self, hooks: AttentionHooks) -> None:
        super().__init__()
        self.hooks, self.calls = hooks, 0
        self.needs_scores = bool(hooks.scores)

    def __torch_function__(
        self, func: Function, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            return self._multi_head(args, kwargs)
        if func in FUSED:
            return self._fused(func, args, kwargs)
        if func in SOFTMAXES - LOG_SOFTMAXES and over_keys(*args, **kwargs):
            return self._softmax(func, args, kwargs)
        return func(*args, **kwargs)

    def _multi_head(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls += bool(self.hooks.heads)
        args = tuple(self._weight(x) for x in args)
        kwargs = {key: self._weight(x) for key, x in kwargs.items()}
        names = {
            name: _Projected(getattr(F, name), self.hooks)
            for name in ("_in_projection", "_in_projection_packed")
        }
        with self:  # inside a mode's own function the mode is off
            return open_multi_head(**names)(*args, **kwargs)

    def _weight(self, x: Any) -> Any:
        for parameter, edit in self.hooks.weights:
            x = edit(x) if x is parameter else x
        return x

    def _fused(
        self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.calls += 1
        if self.hooks.observers and torch.is_grad_enabled():
            given = FusedArguments(*args, **kwargs)
            call = sdpa_call(Caller(self.hooks.module), given)
            with torch.no_grad():
                best = [s.detach().amax((0, 2, 3)) for _, s in call.blocks()]
                self._observe(torch.stack(best).amax(0))
        if not self.needs_scores:
            return func(*args, **kwargs)
        return WrittenOut(scores=self._scores)(*args, **kwargs)

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        z = q @ k
        for edit in self.hooks.scores:
            z = edit(z)
        return z

    def _softmax(
        self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.calls += 1
        z, *rest = args if args else (kwargs.pop("input"),)
        hidden = masked_to_infinity(z)
        seen = ~hidden.isneginf()
        if self.hooks.observers and torch.is_grad_enabled():
            heads = getattr(self.hooks.module, "num_heads", None)
            self._observe(four(hidden.detach(), heads).amax((0, 2, 3)))
        for edit in self.hooks.scores:
            hidden = torch.where(seen, edit(z), hidden)
        given = hidden if self.needs_scores else z
        return func(given, *rest, **kwargs)

    def _observe(self, best_H: Tensor) -> None:
        for observer in self.hooks.observers:
            observer(best_H)


@dataclass(slots=True)
class _Projected:
    """torch's projection of queries, keys and values, with heads edited."""

    function: Callable[..., tuple[Tensor, Tensor, Tensor]]
    hooks: AttentionHooks

    def __call__(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.function(*args)
        heads: int = self.hooks.module.num_heads  # type: ignore[assignment]
        for edit in self.hooks.heads:
            q = edit("q", q.unflatten(-1, (heads, -1))).flatten(-2)
            k = edit("k", k.unflatten(-1, (heads, -1))).flatten(-2)
        return q, k, v


def over_keys(
    input: Tensor, dim: int | None = None, *more: Any, **options: Any
) -> bool:
    """Return whether a softmax looks like attention's: last axis, rows of queries."""
    return dim in (-1, input.ndim - 1) and input.ndim >= 3


@dataclass(slots=True)
class ProjectionHook:
    """Edits queries and keys in what a projection module returns."""

    edit: HeadEdit
    counts: dict[Letter, int]
    """Heads of each letter that this module makes."""
    parts: dict[Letter, Weight] = field(default_factory=dict)
    """Where a map makes more than one letter, or a gate too: which rows."""

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if not self.parts:
            ((letter, heads),) = self.counts.items()
            return self.edit(letter, output.unflatten(-1, (heads, -1))).flatten(-2)
        made = output.clone()
        for letter, weight in self.parts.items():
            rows = _rows(weight, output.shape[-1], output.device)
            x_xHD = output[..., rows].unflatten(-1, (self.counts[letter], -1))
            made = made.index_copy(-1, rows, self.edit(letter, x_xHD).flatten(-2))
        return made


def _rows(weight: Weight, count: int, device: torch.device) -> Tensor:
    """Return which of a module's output features belong to a projection."""
    index = torch.arange(count, device=device)[:, None]
    return replace(weight, transposed=False, local=False).part_of(index)[:, 0]


def edit_heads(changes: Changes, site: AttentionSite, edit: HeadEdit) -> None:
    """Change queries and keys of a site by head until it is undone."""
    maps = projections_of(site)
    counts: dict[Letter, int] = {"q": maps.heads, "k": maps.kv_heads}
    if type(site.module).__name__ == TORCH:
        add_edit(changes, site, "heads", edit)
    elif maps.q.module is not maps.k.module:
        letters: tuple[Letter, Letter] = ("q", "k")
        for letter in letters:
            weight: Weight = getattr(maps, letter)
            rows = {letter: weight} if weight.rows is not None else {}
            hook = ProjectionHook(edit, {letter: counts[letter]}, rows)
            changes.hook(weight.module.register_forward_hook(hook))
    elif maps.q.rows is None:
        raise InputError(
            f"{site.name} makes queries and keys by one and the same map; "
            f"{changes.name} cannot change them apart"
        )
    else:
        parts: dict[Letter, Weight] = {"q": maps.q, "k": maps.k}
        hook = ProjectionHook(edit, counts, parts)
        changes.hook(maps.q.module.register_forward_hook(hook))


def stored_rows(weight: Weight) -> Tensor:
    """Return which output rows of the stored matrix belong to a projection."""
    stored = getattr(weight.module, weight.attribute)
    total = stored.shape[1 if weight.transposed else 0]
    return _rows(weight, total, torch.device("cpu"))


def multiply_rows(stored: Tensor, factor_R: Tensor, axis: int) -> None:
    """Multiply along one axis in place; of a sharded tensor, the part that is here."""
    here = local_part(stored.detach())
    part, parts = split(stored, axis)
    size = -(-stored.shape[axis] // parts)  # torch's chunks: the last ones are short
    factor_r = factor_R[part * size : part * size + here.shape[axis]].to(here)
    here.mul_(factor_r[:, None] if here.dim() == 2 and axis == 0 else factor_r)
