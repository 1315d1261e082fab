"""Routers: which experts the tokens were given to, and how sure the choice was.

Scores alone do not say who was chosen: a bias that balances, groups of experts and
capacities decide after them. So the choice is read where the model hands tokens to the
experts, and from the router's own output where its experts cannot be followed. What is
read of neither is said to be unread; nothing is chosen again from the scores.

Axes, in this file:  N token · E expert · k chosen expert · C candidate.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy import hooks
from equipoise.anatomy.sites import Anatomy, Reason, Router
from equipoise.probes.protocols import Emit, Guarded

NO_CHOICE = Reason(
    "router_choice", hides=("router.load", "router.max_violation", "router.tokens")
)
NO_SCORES = Reason("router_scores", hides=("router.entropy",))
EXACT = 1e-9
"""Misfit below which a normalisation is taken for the router's own."""
ROUNDED = 1e-2
"""What rounding to bf16 may do to a row of probabilities, or to equal weights."""


class Choice(NamedTuple):
    """Which experts the tokens got, in the form the model has it."""

    indices: Tensor | None = None
    """(…, k) integers."""
    mask: Tensor | None = None
    """(…, E): not 0 where an expert gets a token."""
    weights: Tensor | None = None
    """(…, k): what each chosen expert's output is weighted by."""


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """Emit the share of tokens per expert, and the entropy of the scores."""

    name: str = "router"

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        routings = [_Routing(site, r) for site, r in anatomy.routers.items()]
        for seen in routings:
            router = seen.router
            yield hooks.after(router.module, guarded(seen.on_router))
            shared, *each = router.experts or (None,)
            if shared is not None:
                listen = guarded(seen.on_experts)
                yield hooks.before(shared, listen)
            for index, expert in enumerate(each):
                listen = guarded(partial(seen.on_expert, index))
                yield hooks.before(expert, listen)
            # A mixture whose parts are called from elsewhere ends with the model.
            for home in {id(m): m for m in (router.home, anatomy.model)}.values():
                yield hooks.after(home, guarded(partial(seen.on_end, emit)))


@dataclass(slots=True)
class _Routing:
    """One router's choice in one call of its mixture."""

    site: str
    router: Router
    scores_NE: Tensor | None = None
    own: Choice = field(default_factory=Choice)
    """As the router returned it."""
    handed: Choice = field(default_factory=Choice)
    """As the experts were called."""
    tokens: dict[int, int] = field(default_factory=dict)
    """Expert → how many tokens it was called with."""
    listed: list[int] | None = None
    """Tokens per expert, where the router returns a list of them."""

    def on_router(self, module: nn.Module, args: Any, output: Any) -> None:
        returned = output if isinstance(output, tuple | list) else (output,)
        self.scores_NE = scores_in(returned, self.router.count)
        self.own = choice_in(returned, self._count)
        self.listed = _listed(returned, self._count)

    def on_experts(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.handed = choice_in((*args, *kwargs.values())[1:], self._count)

    def on_expert(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        states = next((a for a in (*args, *kwargs.values()) if _is_states(a)), None)
        count = states.shape[:-1].numel() if states is not None else 0
        self.tokens[index] = self.tokens.get(index, 0) + count

    @property
    def _count(self) -> int:
        scored = 0 if self.scores_NE is None else self.scores_NE.shape[-1]
        return self.router.count or scored

    def on_end(self, emit: Emit, module: nn.Module, args: Any, output: Any) -> None:
        """Emit what this call of the mixture chose, and forget it."""
        if not self._ran:
            return
        if self.scores_NE is not None:
            weighted = self.handed if self.handed.weights is not None else self.own
            entropy = entropy_of(self.scores_NE, weighted)
            emit(self.site, "router.entropy", entropy, how="mean")
        else:
            emit.not_read(self.site, NO_SCORES)
        count_E = self._counted()
        if count_E is not None:
            _emit_load(emit, self.site, count_E, self._due)
        else:
            emit.not_read(self.site, NO_CHOICE)
        if self.router.bias is not None:
            holder, name = self.router.bias
            emit(self.site, "router.bias", getattr(holder, name).detach().float())
        self._forget()

    @property
    def _ran(self) -> bool:
        return self.scores_NE is not None or bool(self.tokens) or self.own != Choice()

    @property
    def _due(self) -> int:
        """How many assignments there would be if none were dropped; 0 if unknown."""
        tokens = 0 if self.scores_NE is None else self.scores_NE.shape[:-1].numel()
        return tokens * self.router.picks

    def _counted(self) -> Tensor | None:
        """Return how many tokens each expert got, by the closest witness there is."""
        experts = self._count
        if self.handed.indices is not None:
            return count_indices(self.handed.indices, experts)
        if self.tokens and not self._is_dense:
            counts = [float(self.tokens.get(index, 0)) for index in range(experts)]
            return torch.tensor(counts)
        if self.own.indices is not None:
            return count_indices(self.own.indices, experts)
        if self.listed is not None:
            return torch.tensor([float(n) for n in self.listed])
        for mask in (self.own.mask, self.handed.mask):
            if mask is not None:
                return count_mask(mask, self.router.picks)
        return None

    @property
    def _is_dense(self) -> bool:
        """Whether every expert was given every token, and weights chose afterwards."""
        if self.scores_NE is None:
            return False
        every = self.scores_NE.shape[:-1].numel()
        counts = [self.tokens.get(i, 0) for i in range(self._count)]
        return all(n >= every for n in counts)

    def _forget(self) -> None:
        self.scores_NE, self.listed = None, None
        self.own, self.handed = Choice(), Choice()
        self.tokens.clear()


def _emit_load(emit: Emit, site: str, count_E: Tensor, due: int) -> None:
    total = count_E.sum()
    load_E = count_E / total
    emit(site, "router.load", load_E, how="mean")
    emit(site, "router.tokens", total, how="sum")
    emit(site, "router.max_violation", load_E.amax() * count_E.numel() - 1, how="mean")
    if due:
        emit(site, "router.dropped", 1 - total / due, how="mean")


def scores_in(returned: Sequence[Any], count: int) -> Tensor | None:
    """Return the scores over all experts: the last float tensor that wide.

    Routers that also return weights over all experts return them first.
    """
    floats = [t for t in returned if isinstance(t, Tensor) and t.is_floating_point()]
    wide = [t for t in floats if t.ndim > 1 and (not count or t.shape[-1] >= count)]
    if not wide:
        return None
    widest = max(t.shape[-1] for t in wide)
    scores = [t for t in wide if t.shape[-1] == widest][-1]
    return scores.detach().flatten(0, -2).float()


def choice_in(given: Sequence[Any], count: int) -> Choice:
    """Return the choice among tensors that a router returned or experts were given."""
    tensors = [t.detach() for t in given if isinstance(t, Tensor) and t.ndim > 1]
    whole = [t for t in tensors if not t.is_floating_point()]
    floats = [t for t in tensors if t.is_floating_point()]
    indices = next((t for t in whole if t.shape[-1] < count), None)
    if indices is not None:
        same = (t for t in floats if t.shape == indices.shape)
        return Choice(indices, weights=next(same, None))
    masks = [t for t in whole if t.shape[-1] == count]
    # Two floats as wide as the experts: the first are weights, 0 where not chosen.
    dense = [t for t in floats if t.shape[-1] == count]
    masks += dense[:1] if len(dense) > 1 else []
    return Choice(mask=masks[0] if masks else None)


def _listed(returned: Sequence[Any], count: int) -> list[int] | None:
    for item in returned:
        if isinstance(item, list) and len(item) == count:
            if all(isinstance(n, int) for n in item):
                return item
    return None


def _is_states(given: Any) -> bool:
    return isinstance(given, Tensor) and given.is_floating_point() and given.ndim > 1


def count_indices(indices: Tensor, experts: int) -> Tensor:
    """Return how often each expert stands among indices, without waiting for them.

    >>> count_indices(torch.tensor([[0, 2], [2, 1]]), 4)
    tensor([1., 1., 2., 0.])
    """
    flat = indices.flatten().long()
    # An index past the last expert means none: expert parallelism, skipped tokens.
    ones = torch.ones_like(flat, dtype=torch.float32)
    count_E = ones.new_zeros(experts + 1)
    return count_E.index_add_(0, flat.clamp(0, experts), ones)[:-1]


def count_mask(mask: Tensor, picks: int) -> Tensor:
    """Return how many tokens each expert has in a mask; NaN if it is not sparse.

    >>> count_mask(torch.tensor([[0.0, 0.7], [0.2, 0.0]]), 1)
    tensor([1., 1.])
    """
    chosen_NE = mask.flatten(0, -2) != 0
    sparse = (chosen_NE.sum(-1) <= max(picks, 1)).all()
    count_E = chosen_NE.sum(0).float()
    return torch.where(sparse, count_E, torch.nan)


def entropy_of(scores_NE: Tensor, choice: Choice) -> Tensor:
    """Return the mean entropy in nats of the scores, normalised as the router does.

    Of softmax, sigmoid and √softplus, each divided by its sum, the one is taken whose
    values are proportional to the weights that the chosen experts got; softmax where
    no weights are known. Scores that are probabilities already are taken as they are.
    """
    raw_CNE = torch.stack([make(scores_NE) for make in NORMALISATIONS.values()])
    p_CNE = over_sum(raw_CNE)
    entropy_C = -torch.special.xlogy(p_CNE, p_CNE).sum(-1).mean(-1)
    own = misfits(raw_CNE, choice).argmin()[None]
    is_p = (scores_NE >= 0).all() & ((scores_NE.sum(-1) - 1).abs() < ROUNDED).all()
    as_is = -torch.special.xlogy(scores_NE, scores_NE.clamp(min=0)).sum(-1).mean()
    return torch.where(is_p, as_is, entropy_C.gather(0, own)[0])


def over_sum(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)


NORMALISATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda z: z.softmax(-1),
    "sigmoid": lambda z: z.sigmoid(),
    "sqrtsoftplus": lambda z: F.softplus(z).sqrt(),
}
"""How routers turn scores into shares: Mixtral's way, DeepSeek V3's, and V4's."""


def misfits(raw_CNE: Tensor, choice: Choice) -> Tensor:
    """Return how far each candidate's chosen values are from the weights in use.

    1 - cos² over all tokens, each token's values and weights divided by their sum,
    since many routers renormalise what they chose. Of one expert per token nothing is
    left of that; there the values themselves are compared, unless all weights are one
    number. Zeros, so that the first is taken, where no weights are known.
    """
    if choice.indices is None or choice.weights is None:
        return raw_CNE.new_zeros(len(raw_CNE))
    index_Nk = choice.indices.flatten(0, -2).long().clamp(max=raw_CNE.shape[-1] - 1)
    w_Nk = choice.weights.flatten(0, -2).float()
    if len(index_Nk) != raw_CNE.shape[1]:
        return raw_CNE.new_zeros(len(raw_CNE))
    g_CNk = raw_CNE.gather(-1, index_Nk.expand(len(raw_CNE), -1, -1))
    if index_Nk.shape[-1] > 1:
        misfit_C = _misfit(over_sum(g_CNk), over_sum(w_Nk))
    else:
        tells = w_Nk.amax() - w_Nk.amin() > ROUNDED * w_Nk.amax()
        misfit_C = torch.where(tells, _misfit(g_CNk, w_Nk), 0.0)
    return torch.where(misfit_C < EXACT, 0.0, misfit_C)


def _misfit(g_CNk: Tensor, w_Nk: Tensor) -> Tensor:
    g_CM, w_M = g_CNk.flatten(1).double(), w_Nk.flatten().double()
    size_C = g_CM.square().sum(-1) * w_M.square().sum()
    along_C = (g_CM @ w_M).square()
    return 1 - along_C / size_C.clamp(min=torch.finfo(torch.float64).tiny)
