"""Weights in 8 or 4 bits with their scales, read as the numbers that they stand for.

| layout | weight | scales |
|---|---|---|
| fp8, int8 | `W` | `W_scale_inv`, `W_scale`: one, one a row, or one a block |
| NVFP4 | `W_packed` or `W`, two a byte | `W_scale`, `W_scale_2` or `W_global_scale` |
| MXFP4 | `W_packed` or `W_blocks` | exponents in `W_scale` or `W_scales` |
| nf4, fp4 of bitsandbytes | `W`, two a byte | `W.absmax`, codes in `W.quant_map` |

A pack takes the place of its tensors in the checkpoint, under the name `W`.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from equipoise.auditing.weights.entries import Checkpoint, Entry
from equipoise.errors import InputError

Read = Callable[[int, int], Tensor]
"""First number, how many → those numbers, flat, in float32."""
BYTE = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
NIBBLES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP4 = torch.cat((NIBBLES, -NIBBLES))
"""E2M1: what each of sixteen codes stands for."""
BLOCKS = (128, 64, 32, 16, 256, 512)
"""Usual sizes of a block, the usual ones first: a shape may allow several."""
BITSANDBYTES = ".quant_state.bitsandbytes__"
LARGEST_STATE = 1 << 16
"""Bytes of a state as bitsandbytes writes it; it has 200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """A weight that several stored tensors make together."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    read: Read


def unpacked(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with each pack as one tensor of float32."""
    packs = {pack.name: pack for pack in _packs(checkpoint)}
    if not packs:
        return checkpoint
    gone = {part for pack in packs.values() for part in pack.parts}
    entries = {
        _place(name, packs): entry
        for name, entry in checkpoint.entries.items()
        if name not in gone or _place(name, packs) in packs
    }
    for name, pack in packs.items():
        entries[name] = Entry(shape=pack.shape, dtype=torch.float32)

    def load(name: str, start: int, count: int) -> Tensor:
        read = packs[name].read if name in packs else partial(checkpoint.load, name)
        return read(start, count)

    return replace(checkpoint, entries=entries, load=load, packs=len(packs))


def _place(name: str, packs: Mapping[str, Pack]) -> str:
    """Return the name of the weight whose codes a tensor holds; else its own."""
    for end in ("_packed", "_blocks"):
        if name.endswith(end) and name.removesuffix(end) in packs:
            return name.removesuffix(end)
    return name


def _packs(checkpoint: Checkpoint) -> Iterator[Pack]:
    for name, entry in checkpoint.entries.items():
        if not entry.numel:
            continue
        for layout in (_bytes, _nibbles, _exponents, _codes):
            if (pack := layout(checkpoint, name, entry)) is not None:
                yield pack
                break


def _bytes(checkpoint: Checkpoint, name: str, entry: Entry) -> Pack | None:
    """One number a byte, by one scale, one a row or one a block."""
    names = f"{name}_scale_inv", f"{name}_scale"
    scale = next((n for n in names if n in checkpoint.entries), None)
    if entry.dtype not in BYTE or scale is None:
        return None
    grid = ScaleGrid.of(entry.shape, checkpoint.entries[scale].shape)
    if grid is None:
        return None
    table = _scales(checkpoint, scale)

    def read(start: int, count: int) -> Tensor:
        return checkpoint.load(name, start, count).float() * table[grid(start, count)]

    return Pack(name=name, shape=entry.shape, parts=(name, scale), read=read)


def _nibbles(checkpoint: Checkpoint, name: str, entry: Entry) -> Pack | None:
    """NVFP4, or MXFP4 as compressed-tensors writes it: sixteen or 32 to a scale."""
    own = name.removesuffix("_packed")
    scale = f"{own}_scale"
    known = checkpoint.entries
    if entry.dtype != torch.uint8 or scale not in known or len(entry.shape) < 2:
        return None
    shape = (*entry.shape[:-1], 2 * entry.shape[-1])
    grid = ScaleGrid.of(shape, known[scale].shape)
    if grid is None or known[scale].numel == 1:
        return None
    table = _scales(checkpoint, scale)
    parts = [name, scale]
    for end, power in (("_scale_2", 1), ("_global_scale", -1)):
        if f"{own}{end}" in known and known[f"{own}{end}"].numel == 1:
            table = table * float(checkpoint.read(f"{own}{end}").float()) ** power
            parts.append(f"{own}{end}")

    def read(start: int, count: int) -> Tensor:
        codes = _halves(checkpoint, name, start, count, high_first=False)
        return FP4[codes] * table[grid(start, count)]

    return Pack(name=own, shape=shape, parts=tuple(parts), read=read)


def _exponents(checkpoint: Checkpoint, name: str, entry: Entry) -> Pack | None:
    """MXFP4 as gpt-oss writes it: ``W_blocks``, and a scale for each last row."""
    own = name.removesuffix("_blocks")
    scale = checkpoint.entries.get(f"{own}_scales")
    if own == name or scale is None or entry.dtype != torch.uint8:
        return None
    if scale.shape != entry.shape[:-1] or scale.dtype != torch.uint8:
        return None
    each = 2 * entry.shape[-1]
    table = _scales(checkpoint, f"{own}_scales")

    def read(start: int, count: int) -> Tensor:
        codes = _halves(checkpoint, name, start, count, high_first=False)
        return FP4[codes] * table[torch.arange(start, start + count) // each]

    shape = (*entry.shape[:-2], entry.shape[-2] * each)
    return Pack(name=own, shape=shape, parts=(name, f"{own}_scales"), read=read)


def _codes(checkpoint: Checkpoint, name: str, entry: Entry) -> Pack | None:
    """Codes of a table by the largest size of each block, perhaps packed too."""
    kinds = (f"{name}{BITSANDBYTES}{kind}" for kind in ("nf4", "fp4"))
    key = next((k for k in kinds if k in checkpoint.entries), None)
    if key is None or entry.dtype != torch.uint8:
        return None
    sizes, parts = f"{name}.absmax", [name, key]
    state = _state(checkpoint, key)
    shape, block = tuple(state["shape"]), state["blocksize"]
    total = math.prod(shape)
    parts += [sizes, f"{name}.quant_map"]
    if not set(parts) <= checkpoint.entries.keys() or (total + 1) // 2 != entry.numel:
        return None
    codes = checkpoint.read(f"{name}.quant_map").float()
    table = checkpoint.read(sizes)
    if f"{name}.nested_absmax" in checkpoint.entries:
        parts += [f"{name}.nested_absmax", f"{name}.nested_quant_map"]
        if parts[-1] not in checkpoint.entries:
            return None
        own, each = (checkpoint.read(n).float() for n in parts[-1:-3:-1])
        group = torch.arange(len(table)) // int(state["nested_blocksize"])
        table = own[table.long()] * each[group] + float(state["nested_offset"])
    table = table.float()
    if len(codes) != 16 or len(table) * block < total:
        return None

    def read(start: int, count: int) -> Tensor:
        places = torch.arange(start, start + count) // block
        chosen = _halves(checkpoint, name, start, count, high_first=True)
        return codes[chosen] * table[places]

    return Pack(name=name, shape=shape, parts=tuple(parts), read=read)


def _state(checkpoint: Checkpoint, key: str) -> dict[str, Any]:
    entry = checkpoint.entries[key]
    try:
        if entry.numel > LARGEST_STATE or entry.dtype != torch.uint8:
            raise ValueError("it is not a short text")
        found = json.loads(bytes(checkpoint.read(key).tolist()))
        shape, block = found["shape"], found["blocksize"]
        if not all(type(n) is int and 0 < n < 1 << 40 for n in (*shape, block)):
            raise ValueError("its sizes make no sense")
        found.setdefault("nested_blocksize", 256)
        found.setdefault("nested_offset", 0.0)
        if not found["nested_blocksize"] >= 1:
            raise ValueError("its nested blocks make no sense")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{checkpoint.name}: {key} is not a state of bitsandbytes ({error}); "
            "save the model again"
        ) from error
    return dict(found)


def _halves(
    checkpoint: Checkpoint, name: str, start: int, count: int, *, high_first: bool
) -> Tensor:
    """Return the four-bit codes of some numbers: two lie in a byte."""
    first, last = start // 2, (start + count + 1) // 2
    stored = checkpoint.load(name, first, last - first)
    pair = (stored & 15, stored >> 4)
    codes = torch.stack(pair[::-1] if high_first else pair, dim=-1).reshape(-1)
    return codes[start - 2 * first :][:count].int()


def _scales(checkpoint: Checkpoint, name: str) -> Tensor:
    """Return scales as numbers, flat; bytes are exponents of 2 with offset 127."""
    stored = checkpoint.read(name).reshape(-1)
    if stored.dtype == torch.uint8:
        return torch.exp2(stored.float() - 127)
    return stored.float()


@dataclass(frozen=True, slots=True)
class ScaleGrid:
    """Which scale each number of a tensor has: matrices in blocks of rows × columns."""

    rows: int
    columns: int
    scale_rows: int
    scale_columns: int
    each: bool
    """Whether every matrix of a stack has scales of its own."""

    @classmethod
    def of(cls, shape: tuple[int, ...], scales: tuple[int, ...]) -> "ScaleGrid | None":
        """Return how scales are spread over a tensor; None where they do not fit.

        >>> ScaleGrid.of((576, 7168), (5, 56)).block
        (128, 128)
        >>> ScaleGrid.of((8, 4), (7,)) is None
        True
        """
        rows, columns = (1, *shape)[-2], shape[-1]
        stack, count = shape[:-2], math.prod(scales)
        if count == 1:
            return cls(rows, columns, 1, 1, False)
        if scales == stack and len(stack) == 1:
            return cls(rows, columns, 1, 1, True)
        if scales == shape[:-1]:
            scales = (*scales, 1)
        if len(scales) != len(shape) or scales[:-2] != stack:
            return None
        made = cls(rows, columns, (1, *scales)[-2], scales[-1], True)
        return made if all(made.block) else None

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block; 0 where no size makes so many of them."""
        return (
            _block(self.rows, self.scale_rows),
            _block(self.columns, self.scale_columns),
        )

    def __call__(self, start: int, count: int) -> Tensor:
        at = torch.arange(start, start + count)
        row, column = at // self.columns, at % self.columns
        high, wide = self.block
        place = (row % self.rows) // high * self.scale_columns + column // wide
        size = self.scale_rows * self.scale_columns
        return place + row // self.rows * size if self.each else place


def _block(size: int, count: int) -> int:
    if count in (1, size):
        return size // count
    usual = (b for b in BLOCKS if math.ceil(size / b) == count)
    return next(usual, 0 if size % count else size // count)
