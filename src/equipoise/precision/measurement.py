"""The error that low precision makes, by making it.

The reference runs in float64 (never in TF32: its 11 bits equal fp16's, and a reference
that wrong hides two fifths of the error). Emulated runs use the same float64 model with
rounding added, so the only difference is the one under study.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from equipoise.errors import InputError
from equipoise.numerics.formats import Format
from equipoise.precision.batch import Batch, batch_as, output_of, widened
from equipoise.precision.emulation import (
    Memory,
    Narrow,
    Storage,
    emulated,
    everywhere,
    only,
    relative_error,
)

NATIVE = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


@dataclass(slots=True)
class Bench:
    """A model and a batch, ready to be run in any precision."""

    model: nn.Module
    batch: Batch
    wide: torch.dtype = torch.float64
    _wide_model: nn.Module = field(init=False)
    _wide_batch: Batch = field(init=False)
    _memory: Memory = field(init=False, default_factory=dict)
    reference: Tensor = field(init=False)
    """The output in the wide dtype."""

    def __post_init__(self) -> None:
        self._wide_model = widened(self.model, self.wide)
        self._wide_batch = batch_as(self.batch, self.wide)
        with torch.no_grad():
            self.reference = output_of(self._wide_model, self._wide_batch)
        if not self.reference.isfinite().all():
            raise InputError(
                "the model's output is not finite even in float64: there is no "
                "reference to compare low precision with"
            )

    @property
    def widened(self) -> tuple[nn.Module, Batch]:
        """Return the copy that is measured, and its batch."""
        return self._wide_model, self._wide_batch

    def mismatch(self, storage: Storage, *, narrow: Narrow = everywhere) -> float:
        """Return ‖y_narrow - y‖/‖y‖ with the narrow modules emulated."""
        with (
            torch.no_grad(),
            emulated(self._wide_model, storage, narrow=narrow, memory=self._memory),
        ):
            found = output_of(self._wide_model, self._wide_batch)
        return relative_error(found, self.reference)

    def sites(self, storage: Storage) -> tuple[str, ...]:
        """Return the modules that store anything, in the order they first do."""
        with torch.no_grad(), emulated(self._wide_model, storage) as sites:
            output_of(self._wide_model, self._wide_batch)
        return tuple(sites)

    def by_module(
        self, storage: Storage, sites: Iterable[str] | None = None
    ) -> dict[str, float]:
        """Return the mismatch with one module narrow at a time: the attribution."""
        chosen = self.sites(storage) if sites is None else sites
        return {s: self.mismatch(storage, narrow=only({s})) for s in chosen}

    def native_mismatch(self, format: Format) -> float:
        """Return the mismatch of the model cast to the device's own dtype."""
        dtype = NATIVE.get(format.name)
        if dtype is None:
            raise InputError(
                f"{format.name} has no dtype every layer runs in; "
                f"native runs exist for {', '.join(NATIVE)}"
            )
        with torch.no_grad():
            found = output_of(widened(self.model, dtype), batch_as(self.batch, dtype))
        return relative_error(found, self.reference)

    def gradient_mismatch(self, storage: Storage, *, seed: int = 0) -> dict[str, float]:
        """Return, per parameter, the relative error of a gradient in low precision.

        The scalar differentiated is a fixed random projection of the output, so no
        labels are needed. Weights, activations and gradients are all rounded.
        """
        exact = self._gradients(seed)
        with emulated(self._wide_model, storage, gradients=True):
            found = self._gradients(seed)
        return {
            name: relative_error(found[name], g)
            for name, g in exact.items()
            if name in found and bool((g != 0).any())
        }

    def _gradients(self, seed: int) -> dict[str, Tensor]:
        rng = torch.Generator().manual_seed(seed)
        probe = torch.randn(self.reference.shape, generator=rng).to(self.reference)
        with torch.enable_grad():
            y = output_of(self._wide_model, self._wide_batch)
            wanted = {
                n: p for n, p in self._wide_model.named_parameters() if p.requires_grad
            }
            grads = torch.autograd.grad(
                (y * probe).sum(), list(wanted.values()), allow_unused=True
            )
        return {n: g for n, g in zip(wanted, grads, strict=True) if g is not None}
