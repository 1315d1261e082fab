"""GGUF files: a header of our own reading, packed weights through the gguf package.

The header's counts are checked against the file's size as they are read. Tensors in
float32, float16 and bfloat16 need no package; packed ones are unpacked by ``gguf``, and
are listed but not read where it is not installed.
"""

import struct
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from equipoise.auditing.weights.entries import (
    MOST_TENSORS,
    Checkpoint,
    Entry,
    printable,
)
from equipoise.errors import InputError

PLAIN = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}
"""GGML's number of a type → torch's name."""
NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
TEXT, LIST = 8, 9
LONGEST_TEXT = 1 << 20
MOST_FIELDS = 10_000
MOST_DIMENSIONS = 4
FIELDS = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
}
"""GGUF's name behind the architecture's → the usual one."""


@dataclass(slots=True)
class _Header:
    """Reads numbers and names from a file, and stops at its end."""

    stream: BinaryIO
    path: Path
    size: int

    def bytes(self, count: int) -> bytes:
        if count > self.size - self.stream.tell():
            raise InputError(f"{self.path} is cut off inside its header")
        return self.stream.read(count)

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.bytes(struct.calcsize(f"<{form}")))[0]

    def text(self) -> str:
        length = self.number("Q")
        if length > LONGEST_TEXT:
            raise InputError(f"{self.path}: a text of {length} bytes in its header")
        return self.bytes(length).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """Return one value; of a list (a vocabulary) only its length is wanted."""
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == TEXT:
            return self.text()
        if kind != LIST:
            raise InputError(f"{self.path}: its header has a value of kind {kind}")
        inner, count = self.number("I"), self.number("Q")
        if count > self.size or inner == LIST:
            raise InputError(f"{self.path}: a list of {count} items in its header")
        if inner in NUMBERS:
            self.bytes(count * struct.calcsize(f"<{NUMBERS[inner]}"))
        else:
            for _ in range(count):
                self.value(inner)
        return count


def open_gguf(path: Path) -> Checkpoint:
    """Return the tensors of a GGUF file (version 2 or 3)."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        header = _Header(stream, path, size)
        header.bytes(4)
        version, tensors, fields = (header.number(form) for form in "IQQ")
        if version not in {2, 3} or tensors > MOST_TENSORS or fields > MOST_FIELDS:
            raise InputError(
                f"{path}: GGUF version {version} with {tensors} tensors and {fields} "
                "fields is not one we read"
            )
        metadata = {
            header.text(): header.value(header.number("I")) for _ in range(fields)
        }
        listed = [_tensor(header) for _ in range(tensors)]
        end = stream.tell()
    unit = metadata.get("general.alignment", 32)
    unit = unit if isinstance(unit, int) and 0 < unit <= 1 << 20 else 32
    data = -(-end // unit) * unit
    kinds = {name: kind for name, _, kind, _ in listed}
    entries = {
        name: Entry(
            shape=shape,
            dtype=PLAIN.get(kind, torch.float32 if _packing(kind) else None),
            file=path,
            start=data + start,
        )
        for name, shape, kind, start in listed
    }
    sizes = {name: _bytes(entries[name], kind) for name, kind in kinds.items()}
    for name, entry in entries.items():
        if entry.start + sizes[name] > size:
            raise InputError(f"{path} is cut off: {printable(name)} ends beyond it")

    def load(name: str, start: int, count: int) -> Tensor:
        entry, kind = entries[name], kinds[name]
        assert entry.dtype is not None
        with path.open("rb") as stream:
            if kind in PLAIN:
                stream.seek(entry.start + start * entry.dtype.itemsize)
                held = bytearray(stream.read(count * entry.dtype.itemsize))
                return torch.frombuffer(held, dtype=entry.dtype)
            entries_of, bytes_of = _packing(kind) or (1, 0)
            first = start // entries_of
            blocks = -(-(start + count) // entries_of) - first
            stream.seek(entry.start + first * bytes_of)
            packed = np.frombuffer(stream.read(blocks * bytes_of), dtype=np.uint8)
        return _unpacked(packed, kind)[start - first * entries_of :][:count]

    return Checkpoint(
        name=str(path),
        format="gguf",
        entries=entries,
        load=load,
        config=_config(metadata),
    )


def _tensor(header: _Header) -> tuple[str, tuple[int, ...], int, int]:
    """Return name, shape (rows first), GGML's type and place of one tensor."""
    name, count = header.text(), header.number("I")
    if count > MOST_DIMENSIONS:
        raise InputError(f"{header.path}: {printable(name)} has {count} dimensions")
    shape = tuple(header.number("Q") for _ in range(count))[::-1]
    return name, shape, header.number("I"), header.number("Q")


@cache
def _packing(kind: int) -> tuple[int, int] | None:
    """Return entries and bytes of a block of a type that the gguf package unpacks."""
    if find_spec("gguf") is None:
        return None
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if kind not in {int(item) for item in GGMLQuantizationType}:
        return None
    entries, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    try:
        _unpacked(np.zeros(int(size), np.uint8), kind)
    except NotImplementedError:  # integers, and what is newer than the package
        return None
    return int(entries), int(size)


def _bytes(entry: Entry, kind: int) -> int:
    if kind in PLAIN:
        return entry.numel * PLAIN[kind].itemsize
    block = _packing(kind)
    return 0 if block is None else -(-entry.numel // block[0]) * block[1]


def _unpacked(packed: Any, kind: int) -> Tensor:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    flat = dequantize(packed.reshape(1, -1), GGMLQuantizationType(kind)).reshape(-1)
    return torch.from_numpy(np.ascontiguousarray(flat, dtype=np.float32))


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    kind = metadata.get("general.architecture", "")
    found = {"model_type": kind}
    for name, usual in FIELDS.items():
        if f"{kind}.{name}" in metadata:
            found[usual] = metadata[f"{kind}.{name}"]
    return found
