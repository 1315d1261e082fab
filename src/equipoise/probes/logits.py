"""Output logits: their size, which drifts before the loss shows it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy import hooks
from equipoise.anatomy.call_stack import Caller
from equipoise.anatomy.sharding import WHOLE, is_sharded, local_part
from equipoise.anatomy.sites import Anatomy
from equipoise.probes.hidden_states import dense
from equipoise.probes.protocols import Emit, Guarded
from equipoise.probes.sharding import Parts, PartsProbe

NORM = "output.logit_norm"


class LogitSize(NamedTuple):
    """How large logits are, on their device."""

    most: Tensor
    norm: Tensor
    entries: int
    split: bool
    """Whether other ranks hold other classes of the same tokens."""

    @classmethod
    def of(cls, logits: Tensor) -> "LogitSize":
        split, here = is_sharded(logits), dense(local_part(logits.detach()))
        wide = torch.promote_types(here.dtype, torch.float32)
        norm = torch.linalg.vector_norm(here, dtype=wide)
        return cls(here.abs().amax(), norm, here.numel(), split)


@dataclass(slots=True)
class OutputLogits(PartsProbe):
    """Emit the root-mean-square and the largest magnitude of the model's output.

    A model that returns its loss alone is read where it calls the loss function. Each
    of several ranks has logits of its own tokens, or of its part of the vocabulary:
    squares and counts of all of them make one root-mean-square.
    """

    name: str = "logits"
    ranks: int = 1
    """How many watch together."""
    operations: frozenset[Any] = frozenset({F.cross_entropy})
    _sizes: list[LogitSize] = field(default_factory=list)
    """Sizes of the logits that a loss function was given inside the model."""
    _returned: bool = False
    """Whether the last pass returned logits: then no loss function is looked at."""

    def begin_pass(self) -> None:
        """Forget the calls of an earlier pass."""
        self._sizes = []

    def on_operation(self, caller: Caller, function: Any, args: Any) -> None:
        """Read the logits that a loss function is given inside the model."""
        if not self._returned and args and isinstance(args[0], Tensor):
            self._sizes.append(LogitSize.of(args[0]))

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        listen = guarded(partial(self._read_output, emit))
        # First: the window closes with the model's own last hook.
        yield hooks.after(anatomy.model, listen)

    def _read_output(
        self, emit: Emit, module: nn.Module, args: Any, output: Any
    ) -> None:
        logits = output_logits(output)
        self._returned = logits is not None
        sizes, self._sizes = self._sizes, []
        if logits is not None:
            sizes = [LogitSize.of(logits)] if logits.numel() else []
        if sizes:
            self._emit_sizes(emit, sizes)

    def _emit_sizes(self, emit: Emit, sizes: Sequence[LogitSize]) -> None:
        emit("", "output.logit_max", _most(sizes), how="max")
        norm = torch.linalg.vector_norm(torch.stack([size.norm for size in sizes]))
        count = float(sum(size.entries for size in sizes))
        if self.ranks > 1:
            pair = torch.stack([norm, torch.full_like(norm, count)])
            self._parts.add(NORM, pair, WHOLE)
        elif not any(size.split for size in sizes):
            # A part of the vocabulary alone has no mean.
            emit("", NORM, norm / count**0.5)

    def on_parts(self, ranks: Sequence[Parts], emit: Emit) -> None:
        """Emit √(Σ‖z‖²/Σn) over the ranks."""
        known = [parts[NORM].values.double() for parts in ranks if NORM in parts]
        norm_R, count_R = torch.stack(known).unbind(1)
        emit("", NORM, torch.linalg.vector_norm(norm_R) / count_R.sum().sqrt())


def _most(sizes: Sequence[LogitSize]) -> Tensor:
    return torch.stack([size.most for size in sizes]).amax()


def output_logits(output: Any) -> Tensor | None:
    """Return the logits, or the first floating tensor with a feature axis, if any.

    Of a dictionary only what is called so: an encoder without a head holds states.
    """
    if isinstance(output, Mapping):
        logits = output.get("logits")
    else:
        logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    several = output if isinstance(output, tuple | list) else (output,)
    tensors = (v for v in several if isinstance(v, Tensor) and v.is_floating_point())
    return next((v for v in tensors if v.ndim >= 2), None)
