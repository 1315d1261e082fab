"""The size of what the model says: output logits drift before the loss shows it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy import hooks
from equipoise.anatomy.sharding import is_sharded, local_part
from equipoise.anatomy.sites import Anatomy
from equipoise.probes.capture import Emit, Guarded


@dataclass(frozen=True, slots=True)
class OutputLogits:
    """Emit the root-mean-square and the largest magnitude of the model's output."""

    name: str = "logits"

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        listen = guarded(partial(_listen, emit))
        # First: the window shuts with the model's own last hook.
        yield hooks.after(anatomy.model, listen)


def _listen(emit: Emit, module: nn.Module, args: Any, output: Any) -> None:
    logits = output_logits(output)
    if logits is None or not logits.numel():
        return
    split, logits = is_sharded(logits), local_part(logits)
    emit("", "output.logit_max", logits.detach().abs().amax(), how="max")
    if split:  # part of the vocabulary, or of the tokens: no mean over ranks is right
        return
    rms = torch.linalg.vector_norm(logits, dtype=torch.float32) / logits.numel() ** 0.5
    emit("", "output.logit_norm", rms, how="mean")


def output_logits(output: Any) -> Tensor | None:
    """Return ``.logits``, or the first floating tensor with a feature axis, if any."""
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    several = output if isinstance(output, tuple | list) else (output,)
    tensors = (v for v in several if isinstance(v, Tensor) and v.is_floating_point())
    return next((v for v in tensors if v.ndim >= 2), None)
