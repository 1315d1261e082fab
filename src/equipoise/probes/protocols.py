"""What a probe is: the protocols by which it is attached, called, and emits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol, TypeGuard, TypeVar, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy.call_stack import Caller
from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.sites import Anatomy, Reason
from equipoise.probes.sharding import Parts

How = Literal["mean", "max", "min", "sum", "norm", "last"]
"""How values of several ranks, or of several calls in a step, become one.

``norm``: the ranks hold parts of one vector, whose norm is √Σ‖part‖²; of several calls
the last counts, because it saw the sum.
"""


Hook = Callable[..., None]


class Emit(Protocol):
    """Takes small, detached tensors, still on the device."""

    def __call__(
        self, site: str, quantity: str, values: Tensor, *, how: How = "last"
    ) -> None: ...

    def not_read(self, site: str, why: Reason) -> None:
        """Take the reason why something of a site is not read."""


class Guarded(Protocol):
    """Makes a hook safe: no_grad, no autocast, its exceptions caught."""

    def __call__(self, hook: Hook) -> Hook: ...


P = TypeVar("P")


def implements(probe: Any, kind: Callable[..., P]) -> TypeGuard[P]:
    """Return ``isinstance`` of a probe's protocol, by its methods alone.

    Python 3.11 asks for every name anew: 60 µs a question, a hundred in a sampled step.
    """
    return all(hasattr(probe, method) for method in _methods(kind))


@lru_cache
def _methods(kind: Any) -> tuple[str, ...]:
    kinds = [k for k in kind.__mro__ if getattr(k, "_is_protocol", False)]
    public = [n for k in kinds for n in vars(k) if not n.startswith("_")]
    return tuple(n for n in public if n != "name")


@runtime_checkable
class Probe(Protocol):
    """Something that reads a model and emits small tensors."""

    @property
    def name(self) -> str: ...


@runtime_checkable
class ModuleProbe(Probe, Protocol):
    """A probe that registers hooks.

    ``attach`` is called when the measured forward pass begins, and again for each part
    of a model whose parts are called one by one. It yields one handle per hook as soon
    as the hook exists; all are off again when that pass or part ends. Every hook
    goes through ``guarded``. What must be read in the backward pass is a hook on a
    tensor of the graph, which dies with the graph.
    """

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]: ...


@runtime_checkable
class PassProbe(Probe, Protocol):
    """A probe that is called when a forward pass begins, whose parts may be attached to
    one by one."""

    def begin_pass(self) -> None: ...


@runtime_checkable
class StepProbe(Probe, Protocol):
    """A probe whose reading depends on which step is sampled."""

    def begin_step(self, step: int) -> None: ...


@runtime_checkable
class AttentionProbe(Probe, Protocol):
    """A probe that is handed every attention call."""

    def on_attention(self, site: str, call: AttentionCall, emit: Emit) -> None: ...


@runtime_checkable
class OperationProbe(Probe, Protocol):
    """A probe that is handed calls of some torch functions besides attention.

    ``on_operation(caller, function, args)`` follows each call of ``operations``, which
    are asked for once the probe is attached; ``args`` are all values, named ones last.
    """

    operations: frozenset[Callable[..., Any]]

    def on_operation(
        self, caller: Caller, function: Callable[..., Any], args: Any
    ) -> None: ...


@runtime_checkable
class OtherAxisProbe(Probe, Protocol):
    """A probe that takes what would be attention, had its softmax run over the keys."""

    def on_other_axis(self, call: AttentionCall) -> None: ...


@runtime_checkable
class CallProbe(Probe, Protocol):
    """A probe that is told of every call of the model in a sampled step.

    ``graded``: whether the call may be trained by, or is an evaluation.
    """

    def on_call(
        self, module: nn.Module, args: Any, kwargs: Any, *, graded: bool
    ) -> None: ...


@runtime_checkable
class BackwardProbe(Probe, Protocol):
    """A probe that reads the graph of a loss before its backward pass begins.

    ``roots`` are what the pass differentiates. A hook on a node of the graph goes
    through ``guarded``; the graph is not kept.
    """

    def before_backward(self, roots: Sequence[Tensor], guarded: Guarded) -> None: ...


@runtime_checkable
class GradientProbe(Probe, Protocol):
    """A probe that looks after each backward pass, before clipping.

    By then DDP and FSDP have reduced; ``scale`` is the factor of a GradScaler, which
    the gradients still carry.
    """

    def on_gradients(
        self, anatomy: Anatomy, emit: Emit, *, scale: Tensor | None
    ) -> None: ...


@runtime_checkable
class UpdateProbe(Probe, Protocol):
    """A probe that looks once an optimiser has moved the weights."""

    def on_update(self, optimizer: Optimizer, emit: Emit) -> None: ...


@runtime_checkable
class BeforeUpdateProbe(UpdateProbe, Protocol):
    """A probe that also looks before an optimiser moves the weights."""

    def before_update(self, optimizer: Optimizer, emit: Emit) -> None: ...


@runtime_checkable
class FactProbe(Probe, Protocol):
    """A probe that states facts of the sampled step, once the step is over.

    Its name is the section. Values are JSON values; tensors of any shape among them
    travel to the host with the sample, and become numbers or flat lists.
    """

    def facts(self) -> Mapping[str, Any]: ...


@runtime_checkable
class SharingProbe(Probe, Protocol):
    """A probe that reads what no rank has in full.

    ``begin`` is called once on every rank, outside any pass, where asking the others is
    allowed, and returns how many numbers to make room for. ``parts`` are what this rank
    adds to the one exchange of a sampled step; ``on_parts`` is handed every rank's, the
    same on all of them.
    """

    def begin(self, anatomy: Anatomy) -> int: ...

    def parts(self) -> Parts: ...

    def on_parts(self, ranks: Sequence[Parts], emit: Emit) -> None: ...


@dataclass(kw_only=True)
class WithAnatomy:
    """For probes that need the anatomy once a call or an update arrives."""

    _anatomy: Anatomy | None = None

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        self.describe(anatomy)
        yield from ()

    def describe(self, anatomy: Anatomy) -> None:
        """Take the anatomy before any pass, or a newer one."""
        self._anatomy = anatomy
