"""Facts of the loss: which function, over which targets, at which shift from the ids.

Axes, in this file:  N row of logits · B sequence · T position.
"""

import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy import hooks
from equipoise.anatomy.calls import AttentionCall, is_masked
from equipoise.anatomy.sharding import is_dtensor, local_part
from equipoise.anatomy.sites import Anatomy, named, unwrapped
from equipoise.probes.protocols import Emit, Guarded, WithAnatomy
from equipoise.watching.facts import targets
from equipoise.watching.facts.forward import stack_of
from equipoise.watching.loop.gradient_marks import Mark, mark_of
from equipoise.watching.loop.loss_calls import LossCall, reaches, read_graph
from equipoise.watching.loop.loss_rows import Node, RowLayout

MOST_CALLS = 16
"""Loss functions of one step that are stated; those beyond are only counted."""
MOST_GRAPH_NODES = 20_000
VALUED = 512
"""Rows of which the mean loss is computed again."""
MARKED = 16
"""Parameters by which writes to gradients between two passes are noticed."""
LOSS_NAME = re.compile(r"(aux|balanc|router|commit|(^|_)z_?)\w*loss|loss\w*aux")
"""Names that say of a scalar that it is a loss beside the main one."""
# Between the token embedding and the first block, these leave every place where it is.
IN_PLACE = {
    *("AddBackward0", "SubBackward0", "MulBackward0", "MulBackward1", "DivBackward0"),
    *("DivBackward1", "NativeDropoutBackward0", "EmbeddingBackward0", "PowBackward0"),
    *("NativeLayerNormBackward0", "FusedRmsNormBackward0", "MeanBackward1"),
    *("RsqrtBackward0", "SqrtBackward0", "ToCopyBackward0", "ViewBackward0"),
    *("UnsafeViewBackward0", "CloneBackward0", "AliasBackward0", "MmBackward0"),
    *("AddmmBackward0", "TBackward0", "UnsqueezeBackward0", "ExpandBackward0"),
    "torch::autograd::AccumulateGrad",
}
MOST_BELOW = 96


@dataclass(slots=True, kw_only=True)
class StatedCall:
    """One loss function of one backward pass, without the graph."""

    stated: dict[str, Any]
    reduction: str
    smoothing: float
    class_weights: bool
    target_N: Tensor | None = None
    counted_N: Tensor | None = None
    layout: RowLayout | None = None
    mean: Tensor | None = None
    """The mean loss of all counted rows, where a term beside it is looked for."""
    weight: Tensor | None = None
    """Σ over rows of ∂loss / ∂(the row's loss): 1 where the loss is a plain mean."""
    epsilon: float = 0.0
    """The format's, in which that gradient came."""

    @classmethod
    def of(cls, call: LossCall, *, whole: bool) -> "StatedCall":
        """Return the facts of a call; with its mean over all rows if ``whole``."""
        counted_N = call.counted_N
        target_N = call.target_N
        if target_N is not None and not target_N.is_floating_point():
            target_N = local_part(target_N).clone()
        stated = {
            "function": call.function,
            "given": call.given,
            "reduction": call.reduction,
            "classes": call.classes,
            "ignore_index": call.ignore_index,
            "smoothing": call.smoothing or None,
            "class_weights": call.class_weights or None,
            "targets": None if target_N is None else target_N.numel(),
            "counted": None if counted_N is None else counted_N.sum(),
            "value": _value(call, most=VALUED),
            "hash": None if target_N is None else targets.fingerprint(target_N),
            "uniform": math.log(call.classes) if call.classes else None,
        }
        return cls(
            stated={key: value for key, value in stated.items() if value is not None},
            reduction=call.reduction,
            smoothing=call.smoothing,
            class_weights=call.class_weights,
            target_N=target_N,
            counted_N=counted_N,
            layout=call.layout,
            mean=_value(call, most=sys.maxsize) if whole else None,
        )

    def weigh(self, grads: Sequence[Tensor | None]) -> None:
        """Take the gradient that comes down to the loss function."""
        grad = grads[0]
        if grad is None or self.counted_N is None:
            return
        grad = local_part(grad)
        if self.reduction == "mean":
            weight = grad.sum()
        elif self.class_weights:
            return
        elif self.reduction == "sum":
            weight = grad.sum() * self.counted_N.sum()
        elif grad.numel() == self.counted_N.numel():
            weight = (grad.reshape(-1).double() * self.counted_N).sum()
        else:
            return
        if self.stated["function"] == "log_softmax picked by target":
            weight = -weight  # of log-probabilities, not of losses
        self.weight = weight.double() / (1 - self.smoothing)
        self.epsilon = torch.finfo(grad.dtype).eps


def _value(call: LossCall, *, most: int) -> Tensor | None:
    """Return the mean -log p of the targets, over at most ``most`` rows."""
    log_p, target_N, counted_N = call.log_p, call.target_N, call.counted_N
    if log_p is None or target_N is None or counted_N is None or not len(log_p):
        return None
    if call.given == "unknown" or len(log_p) != len(target_N):
        return None
    step = max(1, len(log_p) // most)
    rows = torch.arange(0, len(log_p), step, device=log_p.device)
    counted = counted_N[rows]
    chosen = torch.where(counted, target_N[rows], 0).clamp(0, log_p.shape[-1] - 1)
    each = torch.where(counted, -log_p[rows, chosen].float(), 0.0)
    return each.sum() / counted.sum()


@dataclass(kw_only=True)
class Pass:
    """The losses of one backward pass that is under way, or over."""

    calls: list[StatedCall]
    unseen: tuple[str, ...]
    constant: bool
    loss: Tensor | None = None
    """What is differentiated, times a scaler's factor; None unless it is a scalar."""
    handles: list[RemovableHandle] = field(default_factory=list)
    scale: Tensor | None = None

    def added(self) -> Tensor | None:
        """Return the sum of all terms of the loss beside its one mean."""
        one = self.calls[0] if len(self.calls) == 1 else None
        if self.loss is None or one is None or one.mean is None or one.weight is None:
            return None
        plain = one.reduction == "mean" and not (one.smoothing or one.class_weights)
        return self.loss - one.weight * one.mean.double() if plain else None

    def end(self) -> None:
        """Take the hooks off the graph."""
        for handle in self.handles:
            handle.remove()
        self.handles = []


class _Embedded(NamedTuple):
    """One call of a table of tokens."""

    rows: int
    ids: Tensor
    output: Tensor | None
    """Where its weight has no gradient."""
    late: bool
    """Whether blocks had run before it: a decoder's, after its encoder."""


@dataclass(kw_only=True)
class LossFacts(WithAnatomy):
    """States what the loss compares, and how it weighs it."""

    name: str = "loss"
    _passes: list[Pass] = field(default_factory=list)
    _pending: Pass | None = None
    _embedded: list["_Embedded"] = field(default_factory=list)
    _causal: dict[str, list[Tensor | bool]] = field(default_factory=dict)
    """Stack of blocks → whether its attention hides the next token, call by call."""
    _crossed: bool = False
    """Whether attention looks at another sequence than the queries'."""
    _aligned: dict[str, Tensor | bool | None] = field(default_factory=dict)
    """Stack → whether place t of the ids is place t of its first block."""
    _marks: list[Mark] = field(default_factory=list)
    _written: bool = False
    """Whether gradients were written between two passes: they do not just add up."""
    _returned: dict[str, Tensor] = field(default_factory=dict)
    """Auxiliary losses in the model's output, by name."""
    _bare: dict[str, Tensor] = field(default_factory=dict)
    """Numbers without a graph in the model's output, by name."""
    _auxiliary: dict[str, Any] = field(default_factory=dict)

    def begin_step(self, step: int) -> None:
        """Forget the step before."""
        self._forget()

    def _forget(self) -> None:
        if self._pending is not None:
            self._pending.end()
        self._passes, self._pending = [], None
        self._embedded, self._causal, self._crossed = [], {}, False
        self._aligned, self._marks, self._written = {}, [], False
        self._returned, self._bare, self._auxiliary = {}, {}, {}

    # The forward pass: ids, causality, places.

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        self.describe(anatomy)
        for _, module in named(anatomy.model):
            if isinstance(module, nn.Embedding):
                yield hooks.after(module, guarded(self._read_embedding))
        first: dict[str, nn.Module] = {}
        for name, block in anatomy.blocks.items():
            first.setdefault(stack_of(name), block)
        for stack, block in first.items():
            yield hooks.before(block, guarded(partial(self._read_first_block, stack)))
        yield hooks.after(anatomy.model, guarded(self._read_output))

    def _read_embedding(self, module: nn.Embedding, args: Any, output: Tensor) -> None:
        ids = next((x for x in args if isinstance(x, Tensor)), None)
        if ids is None or ids.is_floating_point() or ids.ndim not in (1, 2):
            return
        frozen = output if not output.requires_grad else None
        late = len(self._aligned) > 0
        one = _Embedded(module.num_embeddings, ids.clone(), frozen, late)
        self._embedded.append(one)

    def _read_first_block(
        self, stack: str, module: nn.Module, args: Any, kwargs: Any
    ) -> None:
        given = (*args, *kwargs.values())
        x = next((v for v in given if _is_stream(v)), None)
        if x is None or self._aligned.get(stack) is not None:
            return
        frozen = [one.output for one in self._embedded if one.output is not None]
        self._aligned.setdefault(stack, None)
        if frozen:
            self._aligned[stack] = _same_places(x, frozen[0])
        elif x.grad_fn is not None:
            self._aligned[stack] = _only_in_place(x.grad_fn)
        self._embedded = [one._replace(output=None) for one in self._embedded]

    def _read_output(self, module: nn.Module, args: Any, output: Any) -> None:
        pairs: Any = output.items() if isinstance(output, Mapping) else ()
        if isinstance(output, tuple | list):
            pairs = enumerate(output)
        pairs = list(pairs)
        graded = any(isinstance(x, Tensor) and x.requires_grad for _, x in pairs)
        for name, value in pairs:
            if LOSS_NAME.search(str(name)) and _is_differentiable_scalar(value):
                self._returned[f"output.{name}"] = value
            elif graded and _is_bare_scalar(value):
                self._bare[f"output.{name}"] = value.detach().clone()

    def on_attention(self, site: str, call: AttentionCall, emit: Emit) -> None:
        self._crossed |= call.cross
        causal = self._causal.setdefault(stack_of(site), [])
        if len(causal) < 4 and not call.cross:
            hidden = _hides_the_next(call)
            if hidden is not None:
                causal.append(hidden)

    # The backward passes.

    def before_backward(self, roots: Sequence[Tensor], guarded: Guarded) -> None:
        if self._pending is not None:
            self._pending.end()
        if self._passes and self._state() != self._marks:
            self._written = True
        graph = read_graph(roots)
        calls = graph.calls if len(self._passes) < MOST_CALLS else ()
        one = Pass(calls=[], unseen=graph.unseen, constant=graph.has_constant)
        if not self._passes:
            self._find_auxiliary(roots)
            if graph.has_constant:
                self._auxiliary |= {
                    name: {"part": False, "named": False, "bare": True, "value": value}
                    for name, value in self._bare.items()
                }
        if len(roots) == 1 and roots[0].numel() == 1:
            one.loss = roots[0].detach().double().reshape(())
        for call in calls[:MOST_CALLS]:
            stated = StatedCall.of(call, whole=bool(self._auxiliary))
            one.calls.append(stated)
            if stated.target_N is not None and not _compiled_autograd():
                one.handles.append(call.node.register_prehook(guarded(stated.weigh)))
        self._pending = one

    def _find_auxiliary(self, roots: Sequence[Tensor]) -> None:
        """Note which scalars that the model keeps are part of the loss."""
        found, self._returned = dict(self._returned), {}
        model = self._anatomy.model if self._anatomy is not None else nn.Module()
        for name, module in named(model):
            for key, value in vars(module).items():
                if isinstance(value, Tensor) and _is_differentiable_scalar(value):
                    found[f"{name}.{key}".lstrip(".")] = value
        if not found:
            return
        nodes = [value.grad_fn for value in found.values()]
        part = reaches(roots, nodes, most=MOST_GRAPH_NODES)
        if part is None:
            return
        self._auxiliary = {
            name: {
                "part": is_part,
                "named": bool(LOSS_NAME.search(name.rpartition(".")[2])),
                "value": value.detach().clone(),
            }
            for (name, value), is_part in zip(found.items(), part, strict=True)
        }

    def on_gradients(
        self, anatomy: Anatomy, emit: Emit, *, scale: Tensor | None
    ) -> None:
        if self._pending is None:
            return
        one, self._pending = self._pending, None
        one.end()
        one.scale = scale
        self._passes.append(one)
        self._marks = self._state()

    def _state(self) -> list[Mark]:
        if self._anatomy is None:
            return []
        parameters = [p for p in self._anatomy.model.parameters() if p.requires_grad]
        chosen = parameters[:: max(1, len(parameters) // MARKED)]
        return [mark_of(p.grad) for p in chosen]

    # What all of it says.

    def facts(self) -> Mapping[str, Any]:
        stated = self._stated()
        self._forget()
        return stated

    def _stated(self) -> dict[str, Any]:
        if not self._passes:
            return {}
        unseen = [reason for one in self._passes for reason in one.unseen]
        first = self._passes[0]
        found: dict[str, Any] = {
            "passes": len(self._passes),
            "calls": self._stated_calls()[: MOST_CALLS + 1],
            "adds_up": not self._written,
            "constant": first.constant,
            "auxiliary": self._auxiliary,
        }
        if unseen or not any(one.calls for one in self._passes):
            found["unseen"] = {"targets": next(iter(unseen), "own_loss")}
        scale = 1.0 if first.scale is None else first.scale.double()
        if first.loss is not None:
            found["loss"] = first.loss / scale
            found["epsilon"] = max((c.epsilon for c in first.calls), default=0.0)
        if (added := first.added()) is not None:
            found["added"] = added / scale
        return found | self._places()

    def _places(self) -> dict[str, Any]:
        """Return whether the stack of the targets is causal, and keeps each place.

        Where one sequence looks at another, it is the one that began last.
        """
        stacks = list(self._aligned)[-1:] if self._crossed else list(self._causal)
        causal = [one for stack in stacks for one in self._causal.get(stack, ())]
        begun = list(self._aligned.values())
        aligned = (begun[-1] if self._crossed else begun[0]) if begun else None
        found: dict[str, Any] = {} if not causal else {"causal": _all(causal)}
        return found if aligned is None else {**found, "aligned": aligned}

    def _stated_calls(self) -> list[dict[str, Any]]:
        calls = []
        for number, one in enumerate(self._passes):
            for call in one.calls:
                stated = {"pass": number, **call.stated}
                if call.weight is not None:
                    scale = 1.0 if one.scale is None else one.scale.double()
                    stated |= {"weight": call.weight / scale, "epsilon": call.epsilon}
                if number == 0:
                    stated |= self._compared(call)
                calls.append(stated)
        return calls

    def _compared(self, call: StatedCall) -> dict[str, Any]:
        """Return how a loss's targets meet the ids that the model read."""
        lies, target_N, counted_N = call.layout, call.target_N, call.counted_N
        if lies is None or target_N is None or counted_N is None:
            return {}
        each_ids = list(self._ids(call.stated.get("classes"), lies.full))
        if any(map(is_dtensor, (target_N, counted_N, *each_ids))):  # some may be away
            return {}
        B, T = lies.sizes
        in_rows = [x.view(B, T) for x in (target_N, counted_N)]
        in_places = [x.view(T, B).T for x in (target_N, counted_N)]
        own, other = (in_places, in_rows) if lies.turned else (in_rows, in_places)
        target_BT, counted_BT = own
        meets, more = list[dict[str, Any]](), dict[str, Any]()
        model = None if self._anatomy is None else unwrapped(self._anatomy.model)
        ends = () if model is None else end_ids(model)
        for ids_BT in each_ids:
            cut_BT = ids_BT[lies.start[0] :][: lies.sizes[0]]
            t_BT, c_BT, i_BT = targets.first_sequences(target_BT, counted_BT, cut_BT)
            along = {"start": lies.start[1]}
            meets.append(targets.meetings(t_BT, c_BT, i_BT, **along))
            if len(meets) == 1:
                more["crossed"] = _crossed(other, cut_BT, lies)
                more["rows"] = targets.rows_of_others(t_BT, c_BT, i_BT, **along)
                more["changes"] = targets.distinct(t_BT, c_BT)
                if ends:
                    more["ends"] = targets.document_ends(
                        t_BT, c_BT, i_BT, ends, **along
                    )
            if lies.start[1] == 0 and lies.sizes[1] == lies.full[1]:
                # Positions may come first: (T, B), as recurrent models have it.
                first = [x.T for x in (target_BT, counted_BT, ids_BT)]
                turned = targets.first_sequences(*first)
                meets.append(targets.meetings(*turned, start=lies.start[0]))
        return {"meets": meets, **{k: v for k, v in more.items() if v is not None}}

    def _ids(self, classes: int | None, full: tuple[int, int]) -> list[Tensor]:
        """Return ids of the output's shape; those of a table of all classes first."""
        several = len(self._aligned) > 1 and self._crossed
        texts = [one for one in self._embedded if one.late or not several]
        order = sorted(texts, key=lambda one: one.rows != classes)
        seen: list[Tensor] = []
        for one in order:
            ids = one.ids[None] if one.ids.ndim == 1 else one.ids
            if tuple(ids.shape) == full and len(seen) < 2:
                seen.append(ids)
        return seen


def _crossed(
    other: Sequence[Tensor], ids_BT: Tensor, lies: RowLayout
) -> dict[str, Any] | None:
    """Return how targets would meet the next ids, were the rows flattened otherwise."""
    if min(lies.sizes) < 2:
        return None
    target_BT, counted_BT = other
    ways = [(target_BT, counted_BT, ids_BT, lies.start[1])]
    if lies.start[1] == 0 and lies.sizes[1] == lies.full[1]:
        ways.append((target_BT.T, counted_BT.T, ids_BT.T, lies.start[0]))
    found = []
    for t, c, ids, start in ways:
        t, c, ids = targets.first_sequences(t, c, ids)
        table = targets.meetings(t, c, ids, start=start)
        found.append({**table, "changes": targets.distinct(t, c)})
    return {"ways": found, "square": lies.full[0] == lies.full[1]}


def end_ids(model: nn.Module) -> tuple[int, ...]:
    """Return the ids that end a document, as the model's configuration names them."""
    found: set[int] = set()
    for name in ("config", "generation_config"):
        ends = getattr(getattr(model, name, None), "eos_token_id", None)
        ends = ends if isinstance(ends, list | tuple) else [ends]
        found |= {one for one in ends if isinstance(one, int)}
    return tuple(sorted(found))


def _is_stream(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 3


def _is_differentiable_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0 and value.grad_fn is not None


def _is_bare_scalar(value: Any) -> bool:
    """Return whether it is a number of a floating format that has no graph."""
    if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
        return False
    return not value.requires_grad


def _only_in_place(node: Node) -> bool | None:
    """Return True if a token embedding gets there with every place where it was."""
    waiting, seen, embedded = [node], set[Node](), False
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node.name()
        below = [following for following, _ in node.next_functions]
        if name == "SliceBackward0" and _is_leaf(below[0]):
            continue  # the first rows of a table of positions
        if name not in IN_PLACE or len(seen) > MOST_BELOW:
            return None
        if name == "EmbeddingBackward0":
            embedded = True
        else:
            waiting.extend(below)
    return True if embedded else None


def _is_leaf(node: Node) -> bool:
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


def _same_places(x_BTD: Tensor, h_BTD: Tensor) -> Tensor | bool | None:
    """Return whether the stream is the embedding plus the same numbers in each row."""
    if x_BTD.shape != h_BTD.shape:
        return None
    if x_BTD.data_ptr() == h_BTD.data_ptr():
        return True
    if len(x_BTD) < 2:
        return None
    added_BTD = x_BTD.detach().float() - h_BTD.detach().float()
    apart = (added_BTD - added_BTD[:1]).abs().amax()
    most = x_BTD.detach().abs().amax() + h_BTD.detach().abs().amax()
    return apart <= 4 * torch.finfo(x_BTD.dtype).eps * most


def _hides_the_next(call: AttentionCall) -> Tensor | bool | None:
    """Return whether a query sees no key after itself, judged at both ends."""
    _, _, Q, K = call.shape
    if K - call.extra_keys != Q or Q < 3 or call.modify is not None:
        return None
    if call.causal:
        return True
    if call.scores_BHQK is not None:
        hidden = is_masked(call.scores_BHQK.detach())
    elif call.mask is None:
        return False
    elif call.mask.shape[-2] != Q:
        return False if call.mask.shape[-2] == 1 else None
    else:
        mask = call.mask.detach()
        hidden = ~mask if mask.dtype == torch.bool else is_masked(mask)
    return (hidden[..., 0, 1] & hidden[..., Q - 2, Q - 1]).all()


def _all(values: Sequence[Tensor | bool]) -> Tensor | bool:
    if any(value is False for value in values):
        return False
    tensors = [value for value in values if isinstance(value, Tensor)]
    return torch.stack(tensors).all() if tensors else True


def _compiled_autograd() -> bool:
    """Return whether backward passes are compiled: a hook would be traced into them."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "compiled_autograd_enabled", False))
