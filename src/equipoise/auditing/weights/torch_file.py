"""Torch checkpoints, old and new, through ``weights_only`` loading and nothing else.

Before torch sees a file, its zip directory and its pickle are looked at: compressed
records (zip bombs), records larger than the file, and pickles whose tuples, written
out, would be endless are refused. Tensors of a zip file stay on the disk until read.
"""

import io
import pickletools
import re
import zipfile
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from equipoise.auditing.weights.entries import (
    Checkpoint,
    Entry,
    check_count,
    printable,
)
from equipoise.errors import InputError

LARGEST_PICKLE = 8 << 20
"""Bytes of names and shapes: 40,000 tensors take as many."""
LARGEST_OLD = 2 << 30
"""Bytes of a file of the old format, which is read whole."""
LARGEST_DIRECTORY = 16 << 20
ENDLESS = 1_000_000
"""Items of a tuple, written out."""
# Where training scripts put the weights among other things.
PLACES = ("state_dict", "model_state_dict", "model", "module", "net", "ema", "weights")
# What reading a pickle may raise, as its documentation warns.
READING = (
    *(UnpicklingError, EOFError, AttributeError, ImportError, LookupError, OSError),
    *(RuntimeError, TypeError, ValueError, AssertionError, ArithmeticError),
    *(MemoryError, zipfile.BadZipFile, NotImplementedError),
)
GLOBAL = re.compile(r"GLOBAL (\S+)")


def open_torch(path: Path, *, config: Mapping[str, Any]) -> Checkpoint:
    """Return the tensors of a file that ``torch.save`` wrote."""
    with path.open("rb") as stream:
        zipped = stream.read(4) == b"PK\x03\x04"
    try:
        (_check_zip if zipped else _check_old)(path)
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except InputError:
        raise
    except READING as error:
        raise InputError(_why(path, error)) from error
    tensors = dict(_tensors(held))
    if not tensors:
        raise InputError(f"{path} holds no tensors by name; save model.state_dict()")
    check_count(len(tensors), path)
    size = path.stat().st_size
    for name, tensor in tensors.items():
        _check_tensor(path, name, tensor, size)
    return _opened(path, tensors, config)


def _why(path: Path, error: BaseException) -> str:
    if named := GLOBAL.search(str(error)):
        return (
            f"{path} asks to call {named[1]}, which is code, not weights; nothing was "
            "run. Save model.state_dict(), or convert it where you trust it"
        )
    return f"{path} is no whole torch file ({type(error).__name__})"


def _opened(
    path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> Checkpoint:
    def load(name: str, start: int, count: int) -> Tensor:
        return tensors[name].detach().reshape(-1)[start : start + count]

    entries = {
        n: Entry(shape=tuple(t.shape), dtype=t.dtype) for n, t in tensors.items()
    }
    return Checkpoint(
        name=str(path), format="torch", entries=entries, load=load, config=config
    )


def _tensors(held: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of what was saved: a state dict, or one among other things."""
    if not isinstance(held, Mapping):
        return
    own = [(n, t) for n, t in held.items() if isinstance(t, Tensor)]
    place = next((p for p in PLACES if isinstance(held.get(p), Mapping)), None)
    if place is not None and len(own) < 2:
        yield from _tensors(held[place])
    else:
        yield from ((n, t) for n, t in own if isinstance(n, str))


def _check_tensor(path: Path, name: str, tensor: Tensor, size: int) -> None:
    """Refuse a tensor that has more entries than the file has bytes for."""
    plain = tensor.layout == torch.strided and not tensor.is_quantized
    if (
        not plain
        or tensor.device.type != "cpu"
        or type(tensor).__name__
        not in {
            "Tensor",
            "Parameter",
        }
    ):
        raise InputError(f"{path}: {printable(name)} is no plain tensor; save it dense")
    if tensor.numel() * tensor.itemsize > min(size, tensor.untyped_storage().nbytes()):
        raise InputError(
            f"{path}: {printable(name)} of shape {tuple(tensor.shape)} has more "
            "entries than the file holds"
        )


def _check_zip(path: Path) -> None:
    size = path.stat().st_size
    _check_directory(path, size)
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        if any(r.compress_type != zipfile.ZIP_STORED for r in records):
            raise InputError(f"{path} holds compressed records; torch writes none")
        if sum(r.file_size for r in records) > size:
            raise InputError(f"{path} announces more bytes than it has")
        if any("/code/" in r.filename for r in records):
            raise InputError(f"{path} is a TorchScript program; save its state_dict()")
        pickles = [r for r in records if r.filename.endswith("/data.pkl")]
        if len(pickles) != 1 or pickles[0].file_size > LARGEST_PICKLE:
            raise InputError(f"{path} is a zip file, but not one that torch wrote")
        _check_pickle(path, io.BytesIO(archive.read(pickles[0])))


def _check_directory(path: Path, size: int) -> None:
    """Refuse a zip directory too large to read, before it is read."""
    with path.open("rb") as stream:
        stream.seek(max(0, size - 65_557))
        tail = stream.read()
    at = tail.rfind(b"PK\x05\x06")
    length = int.from_bytes(tail[at + 12 : at + 16], "little") if at >= 0 else 0
    if at < 0 or (length > LARGEST_DIRECTORY and length != 0xFFFFFFFF):
        raise InputError(f"{path} is cut off, or no zip file that torch wrote")
    # The 64-bit form says its length in a record of its own, 76 bytes before.
    wide = tail.rfind(b"PK\x06\x06")
    if length == 0xFFFFFFFF or wide >= 0:
        length = int.from_bytes(tail[wide + 40 : wide + 48], "little")
        if wide < 0 or length > LARGEST_DIRECTORY:
            raise InputError(f"{path}: its directory is too large to read")


def _check_old(path: Path) -> None:
    """The old format: four small pickles, then one of names, then the numbers."""
    if path.stat().st_size > LARGEST_OLD:
        raise InputError(
            f"{path} is of torch's old format, read only as a whole: load it where "
            "there is memory and save it again"
        )
    with path.open("rb") as stream:
        head = io.BytesIO(stream.read(LARGEST_PICKLE))
    for _ in range(5):
        _check_pickle(path, head)


def _check_pickle(path: Path, stream: io.BytesIO) -> None:
    """Refuse a pickle whose tuples are endless once written out: hashing one hangs.

    Sizes are followed on an abstract stack; nothing is built and nothing is called.
    """
    stack: list[int] = []
    memo: dict[int, int] = {}
    for op, argument, _ in pickletools.genops(stream):
        if op.name in {"GET", "BINGET", "LONG_BINGET"}:
            stack.append(memo.get(int(argument or 0), 1))
        elif op.name in {"PUT", "BINPUT", "LONG_BINPUT"}:
            memo[int(argument or 0)] = stack[-1] if stack else 1
        elif op.name == "MEMOIZE":
            memo[len(memo)] = stack[-1] if stack else 1
        elif op.name == "DUP":
            stack.append(stack[-1] if stack else 1)
        else:
            _apply(op, stack)
        if stack and stack[-1] > ENDLESS:
            raise InputError(f"{path}: its pickle holds an endless tuple")


MARK = 0


def _apply(op: pickletools.OpcodeInfo, stack: list[int]) -> None:
    """Pop what an operation takes and push what it makes, by size."""
    taken: list[int] = []
    kinds = op.stack_before
    if pickletools.markobject in kinds:
        while stack and (top := stack.pop()) != MARK:
            taken.append(top)
        kinds = list(islice(kinds, kinds.index(pickletools.markobject)))
    for _ in kinds:
        if stack:
            taken.append(stack.pop())
    joins = "TUPLE" in op.name or op.name == "FROZENSET"
    for kind in op.stack_after:
        mark = kind is pickletools.markobject
        stack.append(MARK if mark else 1 + sum(taken) if joins else 1)
