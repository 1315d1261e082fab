"""Open a checkpoint as names, shapes and one tensor at a time; run no code from it.

Known are safetensors (one file, or shards with an index), Hugging Face folders, torch
files, GGUF, checkpoints of the lab, and state dicts in memory. A file is data from a
stranger: its header is checked against its size before a tensor is read, and what
does not fit is one ``InputError``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from equipoise.auditing.weights.entries import (
    FORMS,
    LARGEST_HEADER,
    Checkpoint,
    Entry,
    check_count,
    printable,
    regular,
)
from equipoise.errors import InputError
from equipoise.records import json_object

# What safetensors calls a dtype. Others (packed 4-bit ones) are listed, not read.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": getattr(torch, "float8_e8m0fnu", None),
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def open_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint a path names.

    Raises:
        InputError: If there is none, or its files do not hold what they announce.
    """
    if path.is_dir():
        found = _in_folder(path)
    else:
        regular(path)
        found = _in_file(path)
    if not found.entries:
        raise InputError(f"{path} holds no tensor")
    return found


# By name, in the order in which a folder that has several is read.
WHOLE = ("model.safetensors", "pytorch_model.bin", "model.pt", "consolidated.00.pth")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def _in_folder(path: Path) -> Checkpoint:
    for name in (*INDEXES, *WHOLE):
        if (path / name).exists():
            inside(path, path / name)
            return _in_file(path / name)
    newest = sorted(path.glob("checkpoints/step-????????")) or sorted(
        path.glob("step-????????")
    )
    if newest:
        return _in_folder(newest[-1])
    single = [f for end in ("*.safetensors", "*.gguf") for f in sorted(path.glob(end))]
    if len(single) == 1:
        inside(path, single[0])
        return _in_file(single[0])
    extra = f"; it holds {len(single)} weight files and no index" if single else ""
    raise InputError(f"{path} holds none of {', '.join((*INDEXES, *WHOLE))}{extra}")


def inside(folder: Path, file: Path) -> None:
    """Refuse a link that leaves the folder, but for the Hugging Face cache's own.

    There a snapshot's files are links to ``../../blobs``.
    """
    regular(file)
    root, place = folder.resolve(), file.resolve()
    if root.parent.name == "snapshots":
        root = root.parent.parent
    if not place.is_relative_to(root):
        raise InputError(f"{file} is a link out of {folder}: copy the file there")


def _in_file(path: Path) -> Checkpoint:
    regular(path)
    with path.open("rb") as stream:
        start = stream.read(16)
    if path.name.endswith(".index.json"):
        return _sharded(path)
    # A file of one format does not load the readers of the others.
    if start.startswith(b"GGUF"):
        from equipoise.auditing.weights.gguf_file import open_gguf

        return open_gguf(path)
    # Before torch's: a header of 128 bytes, or 384, begins like a pickle.
    if start[8:9] == b"{":
        return _open_safetensors(path, config_beside(path))
    if start.startswith((b"PK\x03\x04", b"\x80")):
        from equipoise.auditing.weights.torch_file import open_torch

        return open_torch(path, config=config_beside(path))
    raise InputError(f"{path} is no checkpoint we know; give {FORMS}")


def _open_safetensors(path: Path, config: Mapping[str, Any]) -> Checkpoint:
    """Return a file's tensors, mapped; safetensors checks its header and its size."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
    if length > LARGEST_HEADER:  # it would take ten times as much memory
        raise InputError(f"{path}: a header of {length} bytes is too large to read")
    try:
        file: Any = safe_open(path, "pt")
        slices = {name: file.get_slice(name) for name in file.keys()}
        check_count(len(slices), path)
        entries = {
            name: Entry(shape=tuple(s.get_shape()), dtype=DTYPES.get(s.get_dtype()))
            for name, s in slices.items()
        }
    except (SafetensorError, OSError, ValueError) as error:
        reason = printable(str(error).split("deserializing header: ")[-1])
        raise InputError(
            f"{path} is cut off or damaged ({reason}): copy or download it again"
        ) from error

    with path.open("rb") as stream:  # safetensors keeps the last of two, in silence
        json_object(stream.read(8 + length)[8:], f"the header of {path}", once=True)

    def load(name: str, start: int, count: int) -> Tensor:
        found: Tensor = file.get_tensor(name)
        return found.reshape(-1)[start : start + count]

    return Checkpoint(
        name=str(path), format="safetensors", entries=entries, load=load, config=config
    )


def _sharded(path: Path) -> Checkpoint:
    """Return all shards that an index names; each lies beside the index."""
    names = _weight_map(path)
    shards = sorted(set(names.values()))
    for shard in shards:
        if Path(shard).name != shard or shard in {"", ".", ".."}:
            raise InputError(
                f"{path} names a shard outside its folder: {printable(shard)}"
            )
        if not (path.parent / shard).exists():
            raise InputError(f"{path} names {printable(shard)}, which is not there")
        inside(path.parent, path.parent / shard)
    parts = {shard: _in_file(path.parent / shard) for shard in shards}
    _check_index(path, names, parts)
    entries = {n: e for part in parts.values() for n, e in part.entries.items()}
    owner = {n: part for part in parts.values() for n in part.entries}
    return Checkpoint(
        name=str(path.parent),
        format=f"{len(shards)} shards",
        entries=entries,
        load=lambda name, start, count: owner[name].load(name, start, count),
        config=config_beside(path),
    )


def _weight_map(path: Path) -> dict[str, str]:
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict) or not all(
        isinstance(shard, str) and "\0" not in shard for shard in names.values()
    ):
        raise InputError(f"{path} has no weight_map, name → file")
    check_count(len(names), path)
    return names


def _check_index(
    path: Path, names: dict[str, str], parts: Mapping[str, Checkpoint]
) -> None:
    missing = [n for n, shard in names.items() if n not in parts[shard].entries]
    if missing:
        raise InputError(
            f"{path} promises {len(missing)} tensors that its shards lack, such as "
            f"{printable(missing[0])}"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a regular file of bounded size."""
    regular(path)
    if path.stat().st_size > LARGEST_HEADER:
        raise InputError(f"{path}: {path.stat().st_size} bytes of JSON are too many")
    return json_object(path.read_bytes(), path)


def config_beside(path: Path) -> dict[str, Any]:
    """Return the model's configuration: ``config.json``, or what the lab trained."""
    folder = path.parent
    if (folder / "config.json").is_file():
        return read_json(folder / "config.json")
    for place in (folder, folder.parent.parent):
        if (place / "result.json").is_file():
            return _model_of(read_json(place / "result.json").get("task"))
        if (place / "run.eqp").is_file():
            from equipoise.store import open_run

            return _model_of(open_run(place / "run.eqp").info.details.get("task"))
    return {}


def _model_of(task: Any) -> dict[str, Any]:
    """Return the model's options of a task of the lab."""
    found = task.get("model") if isinstance(task, dict) else None
    return found if isinstance(found, dict) else {}
