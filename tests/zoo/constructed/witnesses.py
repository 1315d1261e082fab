"""What a model did in one forward pass, by witnesses that share no code with a probe.

A float64 copy runs eagerly. Every softmax is written down with the module that called
it; every product with a matrix of experts is counted by its rows; and each module is
called again with one token moved a little: if another token's output moves, the module
mixes tokens, whatever it is made of.

Axes, in this file:  B batch · T token · N row · K key · E expert.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tests.oracles.attention import HIDDEN, _dense, theta

NUDGE, MOVED = 1e-3, 1e-12
"""How far a token is moved, and how much of that another must show."""


class Softmax(NamedTuple):
    """Scores that some module gave to a softmax, with its axis last."""

    site: str
    scores: Tensor


@dataclass
class Witnessed:
    """What one forward pass showed."""

    softmaxes: list[Softmax]
    """As the eager model computes them; some round to float32 before a softmax."""
    wide: list[Softmax]
    """With no softmax rounded: what a fused kernel should agree with."""
    mixing: list[str]
    """The innermost modules that mix tokens, in order."""


def scores(
    model: nn.Module, batch: dict[str, Any], *, narrow: bool = True
) -> list[Softmax]:
    """Return the scores of each softmax; its own format only if it may be narrow."""
    found: list[Softmax] = []
    running: list[str] = []
    with ExitStack() as stack, torch.no_grad():
        for handle in _followed(model, running):
            stack.callback(handle.remove)
        stack.enter_context(_softmaxes(lambda: running[-1], found, narrow=narrow))
        model(**batch)
    return found


def witnessed(
    model: nn.Module, batch: dict[str, Any], *, lengths: set[int]
) -> Witnessed:
    """Return the witnesses of one batch; ``lengths`` tell the axis of tokens."""
    wide = scores(model, batch, narrow=False)
    return Witnessed(scores(model, batch), wide, mixing(model, batch, lengths))


def expert_tokens(model: nn.Module, batch: dict[str, Any]) -> dict[str, dict[int, int]]:
    """Return module that holds experts → expert → tokens that it was given."""
    found: dict[str, dict[int, int]] = {}
    with ExpertRows(model, found), torch.no_grad():
        model(**batch)
    return found


def _followed(model: nn.Module, running: list[str]) -> Iterator[Any]:
    """Yield hooks that keep the names of the modules that run, innermost last."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Softmax | nn.Dropout | nn.Identity):
            continue
        yield module.register_forward_pre_hook(lambda *_, n=name: running.append(n))
        yield module.register_forward_hook(
            lambda *_: running.pop() and None, always_call=True
        )


@contextmanager
def _softmaxes(
    where: Callable[[], str], found: list[Softmax], *, narrow: bool
) -> Iterator[None]:
    """Write down the scores of every softmax; fused attention is written out."""
    plain, multi_head = Tensor.softmax, F.multi_head_attention_forward

    def softmax(x: Tensor, dim: int = -1, *_: Any, **kw: Any) -> Tensor:
        found.append(Softmax(where(), x.detach().transpose(dim, -1)))
        return plain(x, dim, kw.get("dtype") if narrow else None)

    def log_softmax(x: Tensor, dim: int = -1, *_: Any, **kw: Any) -> Tensor:
        return softmax(x, dim, **kw).log()

    def dense(q: Tensor, k: Tensor, v: Tensor, *given: Any, **kw: Any) -> Tensor:
        return _dense(softmax, (q, k, v), *given, **kw)

    def with_weights(*given: Any, **kw: Any) -> Any:
        return multi_head(*given, **{**kw, "need_weights": True})

    with ExitStack() as stack:
        changes: dict[str, Any] = {"softmax": softmax, "log_softmax": log_softmax}
        fused = {"scaled_dot_product_attention": dense}
        fused |= {"multi_head_attention_forward": with_weights}
        for home in (torch, Tensor):
            stack.enter_context(mock.patch.multiple(home, **changes))
        stack.enter_context(mock.patch.multiple(F, **changes, **fused))
        yield


NUMBERED = re.compile(r"(.*experts?[^.]*(?:\.\w+)??)\.(?:expert_)?(\d+)\.(.+)")
PRODUCTS = {F.linear, torch.matmul, torch.mm, Tensor.matmul, Tensor.mm}
PRODUCTS |= {Tensor.__matmul__, torch.addmm, torch.bmm, Tensor.bmm}


class ExpertRows(TorchFunctionMode):
    """Counts the rows that are multiplied with each expert's first matrix."""

    def __init__(self, model: nn.Module, found: dict[str, dict[int, int]]) -> None:
        super().__init__()
        self._found = found
        self._names = {id(p): n for n, p in model.named_parameters()}
        self._first: dict[str, str] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        wide = [x for x in args[:3] if isinstance(x, Tensor) and x.ndim >= 2]
        if func in PRODUCTS and len(wide) > 1:
            for rows, matrix in (wide, wide[::-1]):
                self._product(rows, matrix)
        return out

    def _product(self, rows: Tensor, matrix: Tensor) -> None:
        if matrix.ndim == 3 and rows.ndim == 3 and id(matrix) in self._names:
            home, _, own = self._names[id(matrix)].rpartition(".")
            for expert, given in enumerate(rows):
                self._count(home, own, expert, int(given.any(-1).sum()))
        elif (known := self._expert(matrix)) is not None:
            self._count(*known, rows.shape[:-1].numel())

    def _expert(self, matrix: Tensor) -> tuple[str, str, int] | None:
        """Return (module, parameter, expert) of a matrix that is one expert's."""
        base = matrix if matrix._base is None else matrix._base
        name = self._names.get(id(base), "")
        if "expert" in name and matrix.numel() < base.numel():
            home, _, own = name.rpartition(".")
            return home, own, matrix.storage_offset() // matrix.numel()
        if name and base.ndim == 3 and matrix.ndim == 2:  # JetMoe's, under other names
            home, _, own = name.rpartition(".")
            return home, own, matrix.storage_offset() // base.stride(0)
        numbered = NUMBERED.fullmatch(name)
        return None if numbered is None else _of(numbered)

    def _count(self, home: str, parameter: str, expert: int, rows: int) -> None:
        if self._first.setdefault(home, parameter) == parameter:
            counts = self._found.setdefault(home, {})
            counts[expert] = counts.get(expert, 0) + rows


def _of(numbered: re.Match[str]) -> tuple[str, str, int]:
    home, expert, parameter = numbered.groups()
    return home, parameter, int(expert)


@dataclass
class _Call:
    """One call of a module: whether it mixes tokens, and who called it."""

    name: str
    inside: tuple[int, ...]
    mixes: bool = False


def mixing(model: nn.Module, batch: dict[str, Any], lengths: set[int]) -> list[str]:
    """Return the innermost modules in which one token moves another, in order."""
    calls: list[_Call] = []
    open_calls: list[int] = []
    asking = False

    def enter(name: str) -> None:
        if not asking:
            calls.append(_Call(name, tuple(open_calls)))
            open_calls.append(len(calls) - 1)

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        nonlocal asking
        if asking or output is None:
            return
        call = calls[open_calls.pop()]
        asking = True
        try:
            call.mixes = _mixes(module, args, kwargs, output, lengths)
        finally:
            asking = False

    with ExitStack() as stack, torch.no_grad():
        for name, module in model.named_modules():
            before = module.register_forward_pre_hook(lambda *_, n=name: enter(n))
            after = module.register_forward_hook(leave, with_kwargs=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
        model(**batch)
    around = {i for call in calls if call.mixes for i in call.inside}
    inner = (c.name for i, c in enumerate(calls) if c.mixes and i not in around)
    return list(dict.fromkeys(inner))


def _mixes(
    module: nn.Module, args: Any, kwargs: Any, output: Any, lengths: set[int]
) -> bool:
    """Return whether moving one token of the first sequence moves another's output."""
    given = [*args, *kwargs.values()]
    place = next((i for i, x in enumerate(given) if _token_axis(x, lengths)), None)
    made = _first(output, lengths)
    if (
        place is None
        or made is None
        or not any(True for _ in module.children())
        and (isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm))
    ):
        return False
    x = given[place]
    axis = _token_axis(x, lengths)
    moved = x.clone()
    moved.select(axis, 3)[0] += NUDGE * _direction(moved.select(axis, 3)[0])
    given[place] = moved
    values = given[: len(args)], dict(zip(kwargs, given[len(args) :], strict=True))
    try:
        again = _first(module.forward(*values[0], **values[1]), lengths)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError):
        return False  # a module that cannot be called twice tells nothing
    if again is None or again.shape != made.shape:
        return False
    out_axis = _token_axis(made, lengths)
    change = (again - made)[0].abs().transpose(out_axis - 1, 0).flatten(1).amax(1)
    return bool((change > MOVED * max(1.0, float(made.abs().max()))).sum() > 1)


def _direction(x: Tensor) -> Tensor:
    rng = torch.Generator().manual_seed(x.numel())
    return torch.randn(x.shape, generator=rng, dtype=x.dtype)


def _token_axis(x: Any, lengths: set[int]) -> int:
    """Return the axis of the tokens of (B, T, …) or (B, C, T); 0 where there is none.

    A filter that runs over the past makes a few more tokens than it was given.
    """
    if not isinstance(x, Tensor) or x.ndim < 3 or not x.is_floating_point():
        return 0
    return next((a for a in (1, x.ndim - 1, 2) if x.shape[a] in lengths), 0)


def _first(output: Any, lengths: set[int]) -> Tensor | None:
    """Return the first tensor of an output that has an axis of tokens."""
    values = output.values() if isinstance(output, dict) else output
    several = values if not isinstance(output, Tensor) else [output]
    if not isinstance(several, tuple | list) and not hasattr(several, "__iter__"):
        return None
    found = (x for x in several if _token_axis(x, lengths))
    return next(found, None)


@dataclass(frozen=True)
class Rows:
    """What each row of scores should read; rows that do not count are NaN."""

    theta: Tensor
    entropy: Tensor
    max_logit: Tensor
    counted: Tensor


def rows(scores: Tensor, *, sinks: Tensor | None, real: Tensor | None) -> Rows:
    """Return θ, entropy and the largest logit of each row; sinks are not keys.

    ``real`` is (B, T), True for tokens that are no padding.
    """
    if sinks is not None and scores.shape[-1] == scores.shape[-2]:
        column = sinks.detach().view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    z = scores[..., : scores.shape[-1] - (sinks is not None)].double()
    z = torch.where(z <= HIDDEN, -torch.inf, z)  # a NaN hides no key
    visible = (z != -torch.inf).sum(-1)
    counted = visible >= 2
    counted = counted & _real(z != -torch.inf, real)
    visible_z = torch.where(counted[..., None], z, 0.0)
    p = torch.softmax(visible_z, -1)
    entropy = torch.special.entr(p).sum(-1)
    sensitive = theta_of(p)
    if sinks is not None:
        beside = torch.cat([visible_z, scores[..., z.shape[-1] :].double()], -1)
        sensitive = theta_beside_sinks(torch.softmax(beside, -1)[..., : z.shape[-1]])
    values = (sensitive, entropy, z.amax(-1))
    return Rows(*(torch.where(counted, v, torch.nan) for v in values), counted)


def _real(visible: Tensor, real: Tensor | None) -> Tensor:
    """Return which rows are of no padding token, so laid out that they broadcast.

    The batch says which tokens are; a call that hides none of them takes them for
    real. Tokens that a model made itself are padding where no row sees them.
    """
    Q, K = visible.shape[-2:]
    if Q != K:
        return torch.tensor(True)
    seen = visible.unflatten(0, (2, -1)) if len(visible) % 2 == 0 else visible[None]
    seen = seen.flatten(1, -2).any(1)
    if real is not None and real.shape == (2, Q) and len(seen) == 2:
        seen = real if not seen[~real].any() else torch.ones_like(seen)
    each = seen.repeat_interleave(len(visible) // len(seen), 0)
    return each.view(len(visible), *(1,) * (visible.ndim - 3), Q)


def theta_beside_sinks(p_NK: Tensor) -> Tensor:
    """Return max over x = ±1 of Σ|J x|₁, J the softmax's derivative among the keys.

    >>> theta_beside_sinks(torch.tensor([[0.5, 0.5]]))
    tensor([1.])
    """
    signs = itertools.product((-1.0, 1.0), repeat=p_NK.shape[-1])
    x_SK = torch.tensor(list(signs), dtype=p_NK.dtype)
    mean_NS = p_NK @ x_SK.mT
    step_NSK = p_NK[..., None, :] * (x_SK - mean_NS[..., None])
    return step_NSK.abs().sum(-1).amax(-1)


FEW = 12
"""Up to 12 keys, every subset is tried at once."""


def theta_of(p_NK: Tensor) -> Tensor:
    """Return 4 max p(S)(1 − p(S)) over all subsets S, each of them tried.

    >>> theta_of(torch.tensor([[0.5, 0.25, 0.25]]))
    tensor([1.])
    """
    if p_NK.shape[-1] <= FEW:
        return theta(p_NK)
    flat = p_NK.flatten(0, -2)
    found = [_from_halves(p[p > 0]) if p.isfinite().all() else p[0] for p in flat]
    return torch.stack(found).view(p_NK.shape[:-1])


def _from_halves(p_K: Tensor) -> Tensor:
    """Sort one half of the subset sums; the best partner of each other is beside it."""
    first, second = (_sums(half) for half in p_K.sort().values.tensor_split(2))
    second = second.sort().values
    at = torch.searchsorted(second, 0.5 - first).clamp(1, len(second) - 1)
    mass = torch.stack([first + second[at - 1], first + second[at]])
    return (4 * mass * (1 - mass)).amax()


def _sums(p_K: Tensor) -> Tensor:
    sums = p_K.new_zeros(1)
    for p in p_K:
        sums = torch.cat([sums, sums + p])
    return sums
