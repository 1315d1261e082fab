"""How strongly a layer's projections act: G_ℓ, read while the weights are whole."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.sites import Anatomy
from equipoise.numerics.spectra import tracked_norm
from equipoise.probes.capture import Emit, Guarded


@dataclass(slots=True)
class ProjectionGain:
    """Emit G = ‖W_O‖₂‖W_Q‖₂‖W_K‖₂‖W_V‖₂ of each attention site (Emadi 2026, §6).

    The vectors of the last sample start the next: weights move little between samples.
    """

    name: str = "gain"
    _anatomy: Anatomy | None = None
    _start: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        self._anatomy = anatomy
        yield from ()

    def on_attention(self, site: str, call: AttentionCall, emit: Emit) -> None:
        assert self._anatomy is not None
        found = self._anatomy.site(call.module) if call.module is not None else None
        if found is None or found.projections is None:
            return
        norms = []
        for letter in "qkvo":
            matrix = getattr(found.projections, letter).matrix()
            start = self._start.get((site, letter))
            norm, self._start[site, letter] = tracked_norm(matrix, start=start)
            emit(site, f"projection.norm.{letter}", norm)
            norms.append(norm)
        emit(site, "projection.G", torch.stack(norms).prod())
