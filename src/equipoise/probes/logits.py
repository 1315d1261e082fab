"""Output logits: their size, which drifts before the loss shows it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy import hooks
from equipoise.anatomy.sharding import WHOLE, is_sharded, local_part
from equipoise.anatomy.sites import Anatomy
from equipoise.probes.hidden_states import dense
from equipoise.probes.protocols import Emit, Guarded
from equipoise.probes.sharding import Parts, PartsProbe

NORM = "output.logit_norm"


@dataclass(slots=True)
class OutputLogits(PartsProbe):
    """Emit the root-mean-square and the largest magnitude of the model's output.

    Each of several ranks has logits of its own tokens, or of its part of the
    vocabulary: squares and counts of all of them make one root-mean-square.
    """

    name: str = "logits"
    ranks: int = 1
    """How many watch together."""

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
        if logits is None or not logits.numel():
            return
        split, logits = is_sharded(logits), dense(local_part(logits.detach()))
        emit("", "output.logit_max", logits.abs().amax(), how="max")
        wide = torch.promote_types(logits.dtype, torch.float32)
        norm = torch.linalg.vector_norm(logits, dtype=wide)
        count = float(logits.numel())
        if self.ranks > 1:
            pair = torch.stack([norm, torch.full_like(norm, count)])
            self._parts.add(NORM, pair, WHOLE)
        elif not split:  # a part of the vocabulary alone has no mean
            emit("", NORM, norm / count**0.5)

    def on_parts(self, ranks: Sequence[Parts], emit: Emit) -> None:
        """Emit √(Σ‖z‖²/Σn) over the ranks."""
        known = [parts[NORM].values.double() for parts in ranks if NORM in parts]
        norm_R, count_R = torch.stack(known).unbind(1)
        emit("", NORM, torch.linalg.vector_norm(norm_R) / count_R.sum().sqrt())


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
