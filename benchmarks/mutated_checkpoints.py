"""Damage checkpoints in many ways; an audit must answer, or refuse in one line.

``python -m benchmarks.mutated_checkpoints [FILES [SEED]]``; 10,000 files by default.
It can be run in parts: from seed 1 on, a part is added to those before it.

Sound files of every format are mutated as bytes (as run files are) and as what they
mean: shapes, offsets, names, types, pickles that call code. Each outcome is *refused*
(our own error), *audited*, or *foreign* (an exception that is not ours). Counted beside
it are CPU seconds of the slowest file, the process's peak memory, and whether any code
from a pickle ran.
"""

import io
import json
import pickle
import random
import resource
import struct
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.mutated_runs import MUTATIONS
from benchmarks.table import RESULTS, publish
from equipoise.auditing.audit import audit
from equipoise.errors import EquipoiseError
from tests.models import GPT, GPTConfig

MARKER = "executed.txt"
CONFIG = {"num_attention_heads": 2, "layer_norm_eps": 1e-5}


class Calls:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self.path, "ran")


def sound(folder: Path) -> dict[str, bytes]:
    """Return a small model in every format, as bytes by file name."""
    torch.manual_seed(0)
    state = GPT(GPTConfig(width=16, depth=2, heads=2, context=8)).state_dict()
    state = {name: tensor.contiguous().clone() for name, tensor in state.items()}
    save_file(state, folder / "a.safetensors")
    torch.save(state, folder / "b.pt")
    torch.save({"model": state, "step": 3}, folder / "c.pt")
    torch.save(state, folder / "d.pt", _use_new_zipfile_serialization=False)
    (folder / "e.gguf").write_bytes(gguf(state))
    names = [f"{letter}." for letter in "abcde"]
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.name[:2] in names
    }


def gguf(state: dict[str, torch.Tensor]) -> bytes:
    """Return float32 tensors as a GGUF file of version 3."""
    fields = [text("general.architecture"), struct.pack("<I", 8), text("llama")]
    fields += [text("llama.attention.head_count"), struct.pack("<II", 4, 2)]
    head, data = [b"GGUF", struct.pack("<IQQ", 3, len(state), 2), *fields], b""
    for name, tensor in state.items():
        shape = tuple(tensor.shape)[::-1]
        head += [text(name), struct.pack(f"<I{len(shape)}Q", len(shape), *shape)]
        head.append(struct.pack("<IQ", 0, len(data)))
        data += tensor.float().numpy().tobytes()
        data += bytes(-len(data) % 32)
    start = b"".join(head)
    return start + bytes(-len(start) % 32) + data


def text(given: str) -> bytes:
    return struct.pack("<Q", len(given.encode())) + given.encode()


def _header(data: bytearray, change: Callable[[dict[str, Any]], Any]) -> bytearray:
    """Return a safetensors file with another header before the same numbers."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    changed = change(header)
    new = changed if isinstance(changed, bytes) else json.dumps(header).encode()
    return bytearray(struct.pack("<Q", len(new)) + new + data[8 + length :])


def _shape(header: dict[str, Any], rng: random.Random) -> None:
    name = rng.choice(list(header))
    sizes = (0, -1, 1 << 40, 1 << 63, 1.5, "3", None, [], True)
    header[name]["shape"] = [
        rng.choice(sizes) for _ in range(rng.choice((0, 1, 2, 5000)))
    ]


def _offsets(header: dict[str, Any], rng: random.Random) -> None:
    name, other = rng.choice(list(header)), rng.choice(list(header))
    choices = ([0, 1 << 62], [-8, 0], [8, 0], header[other]["data_offsets"], "ab", None)
    header[name]["data_offsets"] = rng.choice(choices)


def _names(header: dict[str, Any], rng: random.Random) -> bytes | None:
    name = rng.choice(list(header))
    spec = header.pop(name)
    kind = rng.randrange(4)
    if kind == 0:
        return json.dumps(header).encode().replace(b"blocks", b"\xff\xfe\x00\x80")
    odd = ("\u202e\x1b[31m", "a" * 50_000, "../../etc/passwd", "blocks.9" * 99)[kind]
    header[odd] = spec
    return None


def _kinds(header: dict[str, Any], rng: random.Random) -> None:
    name = rng.choice(list(header))
    header[name]["dtype"] = rng.choice(("F16", "BF16", "F4", "X", 7, None, "F8_E4M3"))


def _nested(header: dict[str, Any], rng: random.Random) -> bytes:
    return b'{"a":' * rng.choice((10, 2000, 200_000)) + b"1"


def _many(header: dict[str, Any], rng: random.Random) -> bytes:
    spec = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    count = rng.choice((1000, 50_000))
    return ("{" + ",".join(f'"t{i}":{spec}' for i in range(count)) + "}").encode()


MEANINGS = (_shape, _offsets, _names, _kinds, _nested, _many)
WEIGHTS = (6, 6, 4, 3, 1, 1)


def _zip(data: bytearray, rng: random.Random, marker: Path) -> bytearray:
    """Return a torch file with another pickle, compressed records, or huge ones."""
    made = io.BytesIO()
    kind = rng.randrange(4)
    with (
        zipfile.ZipFile(io.BytesIO(bytes(data))) as old,
        zipfile.ZipFile(made, "w") as new,
    ):
        for record in old.infolist():
            held = old.read(record)
            if record.filename.endswith("data.pkl") and kind == 0:
                held = pickle.dumps({"w": Calls(marker)}, protocol=2)
            if record.filename.endswith("data.pkl") and kind == 1:
                held = endless()
            way = zipfile.ZIP_DEFLATED if kind == 2 else zipfile.ZIP_STORED
            held = bytes(1 << 22) if kind == 2 else held
            new.writestr(record.filename, held, compress_type=way)
        if kind == 3:
            new.writestr("archive/code/a.py", "raise SystemExit")
    return bytearray(made.getvalue())


def endless() -> bytes:
    """Return a pickle of a dict whose key is a tuple of 2⁶⁰ items, written out."""
    levels = b"".join(
        b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) + b"0"
        for i in range(60)
    )
    return b"\x80\x02}q\xffK\x01\x85q\x000" + levels + b"h\xffh\x3cK\x01s."


def _pickled(data: bytearray, rng: random.Random, marker: Path) -> bytearray:
    return bytearray(pickle.dumps(Calls(marker), protocol=rng.choice((2, 4))))


def mutated(
    name: str, data: bytearray, rng: random.Random, marker: Path
) -> tuple[str, bytearray]:
    """Return what was done to a file, and the file."""
    if rng.random() < 0.4 and name.endswith(".safetensors"):
        change = rng.choices(MEANINGS, WEIGHTS)[0]
        return change.__name__, _header(data, lambda header: change(header, rng))
    if rng.random() < 0.2 and name.endswith(".pt"):
        make = _pickled if name == "d.pt" else _zip
        return make.__name__, make(data, rng, marker)
    # Half of the damage goes to the first kilobyte, where headers are.
    kind = rng.choice(list(MUTATIONS)[:6])
    size = 1024 if rng.random() < 0.5 else len(data)
    head = data[:size]
    MUTATIONS[kind](head, rng)
    return kind, head + data[size:]


def outcome(path: Path) -> str:
    """Return what became of an audit."""
    try:
        audit(path)
    except EquipoiseError as error:
        return "refused" if "\n" not in str(error) else "refused in many lines"
    except Exception as error:
        return f"foreign {type(error).__name__}"
    return "audited"


def campaign(folder: Path, count: int, *, seed: int = 0) -> dict[str, Any]:
    """Return outcomes by kind of mutation, the slowest file, and what was executed."""
    rng, marker = random.Random(seed), folder / MARKER
    files = sound(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    found: dict[str, Counter[str]] = {}
    slowest, foreign = 0.0, list[str]()
    for index in range(count):
        name = rng.choice(list(files))
        kind, data = mutated(name, bytearray(files[name]), rng, marker)
        path = folder / f"mutated{Path(name).suffix}"
        path.write_bytes(data)
        start = time.process_time()
        what = outcome(path)
        slowest = max(slowest, time.process_time() - start)
        found.setdefault(kind.strip("_"), Counter())[what] += 1
        if what.startswith("foreign") or what.endswith("lines"):
            foreign.append(f"seed {seed}: {index} {name} {kind} {what}")
    return {
        "outcomes": found,
        "slowest": slowest,
        "executed": marker.exists(),
        "foreign": foreign,
    }


def main() -> None:
    """Run the campaign, or a part of it, and print the table so far."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with tempfile.TemporaryDirectory() as folder:
        found = campaign(Path(folder), count, seed=seed)
    outcomes: dict[str, Counter[str]] = found["outcomes"]
    part = {
        "files": count,
        "seeds": 1,
        "slowest_cpu_seconds": found["slowest"],
        "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "executed": found["executed"],
        "foreign": found["foreign"],
    }
    path = RESULTS / "mutated_checkpoints.json"
    if seed and path.exists():
        part = _added(json.loads(path.read_text()), part, outcomes)
    _publish(outcomes, part)


LARGEST = ("slowest_cpu_seconds", "peak_megabytes")


def _added(
    before: dict[str, Any], part: dict[str, Any], outcomes: dict[str, Counter[str]]
) -> dict[str, Any]:
    """Return the counts of all parts so far; outcomes are added in place."""
    for row in before["rows"]:
        counts = {k: v for k, v in row.items() if k not in {"mutation", "files"}}
        if row["mutation"] != "all":
            outcomes.setdefault(row["mutation"], Counter()).update(counts)
    largest = {key: max(before[key], part[key]) for key in LARGEST}
    return {key: before[key] + value for key, value in part.items()} | largest


def _publish(outcomes: dict[str, Counter[str]], part: dict[str, Any]) -> None:
    total: Counter[str] = sum(outcomes.values(), Counter())
    rows = [
        {"mutation": kind, "files": sum(counts.values()), **counts}
        for kind, counts in [*outcomes.items(), ("all", total)]
    ]
    publish("mutated_checkpoints", rows, **part)


if __name__ == "__main__":
    main()
