"""Facts of the batch: its size, padding and documents, and whether it repeats."""

import gc
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy import hooks
from equipoise.anatomy.sharding import is_sharded
from equipoise.anatomy.sites import Anatomy, unwrapped
from equipoise.probes.protocols import Emit, Guarded, WithAnatomy
from equipoise.watching.facts.targets import fingerprint

IDS = ("input_ids", "idx", "ids", "tokens", "decoder_input_ids")
MASKS = ("attention_mask", "key_padding_mask", "padding_mask", "mask")
MOST_TENSORS = 8
LOOKED_UP = 4


@dataclass(kw_only=True)
class BatchFacts(WithAnatomy):
    """States what the first micro-batch of the step is, and how many there were."""

    name: str = "batch"
    _stated: dict[str, Any] = field(default_factory=dict)
    _passes: int = 0
    _memory: tuple[StorageWeakRef, ...] = ()
    """Where the batch of the last sampled step lay: the same place, still in use, is a
    batch that the loop keeps, and not one that was made again."""
    _parallel: str = ""
    _samples: int = 0
    _whole: bool = False

    def begin_step(self, step: int) -> None:
        """Forget the step before, but for where its batch lay."""
        self._stated, self._passes = {}, 0

    def describe(self, anatomy: Anatomy) -> None:
        """Take the model, and how it is shared among ranks."""
        super().describe(anatomy)
        self._parallel = parallel(anatomy.model)

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        self.describe(anatomy)
        model = unwrapped(anatomy.model)
        yield hooks.before(model, guarded(self._read_arguments))

    def on_gradients(
        self, anatomy: Anatomy, emit: Emit, *, scale: Tensor | None
    ) -> None:
        self._passes += 1

    def _read_arguments(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        named = {**{str(i): x for i, x in enumerate(args)}, **kwargs}
        tensors = {k: x for k, x in named.items() if isinstance(x, Tensor) and x.ndim}
        if not tensors or self._stated:
            return
        self._stated = {
            **_sizes(tensors),
            **_padding(tensors, unwrapped(module)),
            **_documents(kwargs),
            "hash": [fingerprint(x) for x in list(tensors.values())[:MOST_TENSORS]],
            "kept": self._kept(tensors),
            "whole": self._is_whole(),
        }

    def _kept(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether the last sampled batch lies where this one does."""
        before = [ref.cdata for ref in self._memory if not ref.expired()]
        now = [StorageWeakRef(x.untyped_storage()) for x in tensors.values()]
        self._memory = tuple(now)
        return any(ref.cdata in before for ref in now)

    def _is_whole(self) -> bool:
        """Return whether the data are one batch; looked up once, after a few samples:
        before that a repeated batch is not judged, and the search takes 0.05 s."""
        self._samples += 1
        if self._samples == LOOKED_UP:
            self._whole = one_batch_loader()
        return self._whole

    def facts(self) -> Mapping[str, Any]:
        stated, self._stated = self._stated, {}
        if not stated:
            return {}
        return {**stated, "micro_batches": self._passes, "parallel": self._parallel}


def one_batch_loader() -> bool:
    """Return whether a loader of this process gives all of its data in one batch."""
    kind = getattr(sys.modules.get("torch.utils.data"), "DataLoader", None)
    if kind is None:
        return False
    return any(map(_gives_one, (x for x in gc.get_objects() if type(x) is kind)))


def _gives_one(loader: Any) -> bool:
    try:
        return len(loader) == 1
    except TypeError:  # a stream has no length
        return False


def _sizes(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return sequences and tokens: of ids if there are any, or rows of an input."""
    ids = _ids(tensors)
    if ids is not None:
        return {"sequences": ids.shape[0], "tokens": ids.numel()}
    first = next(iter(tensors.values()))
    return {"sequences": first.shape[0], "shape": list(first.shape)}


def _ids(tensors: Mapping[str, Tensor]) -> Tensor | None:
    named = (tensors[name] for name in IDS if name in tensors)
    found = (x for x in (*named, *tensors.values()) if _whole(x) and x.ndim == 2)
    return next(found, None)


def _whole(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex())


def _padding(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Any]:
    """Return how many places are padding, by the mask, or by the configuration."""
    for name in MASKS:
        mask, ids = tensors.get(name), _ids(tensors)
        if mask is not None and ids is not None and mask.shape == ids.shape:
            hidden = mask == 0 if name == "attention_mask" else mask.bool()
            return {"padding": hidden.sum()} if _whole(mask) else {}
    pad, ids = getattr(getattr(model, "config", None), "pad_token_id", None), None
    ids = _ids(tensors)
    if isinstance(pad, int) and ids is not None:
        return {"padding": (ids == pad).sum()}
    return {}


def _documents(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many packed documents the loop declares."""
    starts = kwargs.get("cu_seq_lens_q", kwargs.get("cu_seqlens"))
    if isinstance(starts, Tensor):
        return {"documents": len(starts) - 1}
    positions = kwargs.get("position_ids")
    if isinstance(positions, Tensor) and positions.ndim == 2:
        return {"documents": (positions == 0).sum()}
    return {}


def parallel(model: nn.Module) -> str:
    """Return how ranks share the model: data-parallel ranks need different batches.

    A mesh with more than one axis is left alone: some of its ranks share a batch.
    """
    kinds = {type(module).__name__ for module in model.modules()}
    sharded = [p for p in model.parameters() if is_sharded(p)]
    meshes = {getattr(p, "device_mesh", None) for p in sharded}
    if any(mesh is not None and mesh.ndim > 1 for mesh in meshes):
        return "several axes"
    if "DistributedDataParallel" in kinds:
        return "several axes" if sharded else "data"
    by_data = {"FullyShardedDataParallel"} & kinds or any(
        name.startswith("FSDP") for name in kinds
    )
    if by_data:
        return "data"
    return "model" if sharded else ""
