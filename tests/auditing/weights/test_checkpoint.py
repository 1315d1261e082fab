"""Checkpoints of every format read alike; hostile ones are refused in one line."""

import io
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.mutated_checkpoints import MARKER, Calls, campaign, endless, gguf
from equipoise.auditing.audit import audit
from equipoise.auditing.weights import gguf_file
from equipoise.auditing.weights.checkpoint import open_checkpoint
from equipoise.auditing.weights.entries import in_memory
from equipoise.auditing.weights.layout import attentions
from equipoise.errors import InputError


def state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (8, 6), "b.weight": (5,), "c.bias": (3, 2)}
    return {n: torch.randn(s, generator=generator) for n, s in shapes.items()}


def sharded(folder: Path, tensors: dict[str, Tensor]) -> Path:
    names = {}
    for index, (name, tensor) in enumerate(tensors.items()):
        names[name] = f"model-{index}.safetensors"
        save_file({name: tensor}, folder / names[name])
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    return folder


def written(folder: Path, kind: str) -> Path:
    """Return where the state was written in a format."""
    tensors = state()
    if kind == "shards":
        return sharded(folder, tensors)
    path = folder / {"safetensors": "m.safetensors", "gguf": "m.gguf"}.get(kind, "m.pt")
    if kind == "safetensors":
        save_file(tensors, path)
    elif kind == "gguf":
        path.write_bytes(gguf(tensors))
    elif kind == "old torch":
        torch.save(tensors, path, _use_new_zipfile_serialization=False)
    else:
        torch.save(
            {"model": tensors, "step": 1} if kind == "trainer" else tensors, path
        )
    return path


@pytest.mark.parametrize(
    "kind", ["safetensors", "shards", "torch", "old torch", "trainer", "gguf"]
)
def test_reads_what_was_written(tmp_path: Path, kind: str) -> None:
    found = open_checkpoint(written(tmp_path, kind))
    for name, tensor in state().items():
        assert torch.equal(found.read(name), tensor)
        parts = list(found.chunks(name, size=4))
        assert torch.equal(torch.cat(parts), tensor.reshape(-1))
        assert max(len(part) for part in parts) <= 4


def test_a_header_may_begin_like_a_pickle(tmp_path: Path) -> None:
    """Of safetensors files one in 32 has a header whose length ends in 0x80."""
    for length in (128, 384):
        plain = json.dumps({"a": spec(shape=[2], at=[0, 8])}).encode()
        header = plain.ljust(length)
        path = tmp_path / f"{length}.safetensors"
        path.write_bytes(safetensors(header, bytes(8)))
        assert path.read_bytes()[:1] == b"\x80"
        assert open_checkpoint(path).entries["a"].shape == (2,)


def quantised(path: Path) -> dict[str, torch.Tensor]:
    """Write a layer in 8 and in 4 bits as llama.cpp would; return what it stands for.

    The package's own writer and quantisers: neither is code of ours.
    """
    writer = GGUFWriter(path, "llama")
    writer.add_head_count(4)
    rng, stands_for = np.random.default_rng(0), {}
    kinds = {"q": "Q8_0", "k": "Q8_0", "v": "Q4_0", "output": "Q4_0"}
    for name, kind in kinds.items():
        weight = rng.standard_normal((64, 64), dtype=np.float32) / 8
        packed = quantize(weight, GGMLQuantizationType[kind])
        key = f"blk.0.attn_{name}.weight"
        writer.add_tensor(key, packed, raw_dtype=GGMLQuantizationType[kind])
        plain = dequantize(packed, GGMLQuantizationType[kind])
        stands_for[key] = torch.from_numpy(plain)
    for write in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{write}_to_file")()
    writer.close()
    return stands_for


def test_reads_gguf_that_is_packed(tmp_path: Path) -> None:
    exact = quantised(tmp_path / "m.gguf")
    found = open_checkpoint(tmp_path / "m.gguf")
    for name, weight in exact.items():
        assert torch.equal(found.read(name), weight)
        # Chunks begin and end inside blocks of 32.
        parts = list(found.chunks(name, size=1000))
        assert torch.equal(torch.cat(parts), weight.reshape(-1))
    judged = audit(tmp_path / "m.gguf")
    assert judged.verdict.state == "healthy", judged.verdict
    (norm,) = judged.reading("projection.norm.v").values()
    largest = torch.linalg.matrix_norm(exact["blk.0.attn_v.weight"].double(), 2)
    assert norm[0] == pytest.approx(float(largest), rel=1e-4)
    ((*heads,),) = judged.reading("projection.qk").values()
    assert len(heads) == 4


@pytest.mark.parametrize("kind", [9999, 24], ids=["unknown", "integers"])
def test_types_that_nothing_unpacks_are_listed(tmp_path: Path, kind: int) -> None:
    data = bytearray(gguf({"w": torch.zeros(4, 32)}))
    place = data.index(b"w", 60) + 1 + 4 + 16
    data[place : place + 4] = struct.pack("<I", kind)
    (tmp_path / "m.gguf").write_bytes(data)
    assert open_checkpoint(tmp_path / "m.gguf").entries["w"].dtype is None


def test_packed_gguf_without_the_package_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised(tmp_path / "m.gguf")
    monkeypatch.setattr(gguf_file, "_packing", lambda kind: None)
    found = audit(tmp_path / "m.gguf")
    assert found.verdict.state == "not judged"
    assert "install the gguf package" in " ".join(found.facts)


def test_a_model_brings_its_heads() -> None:
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64)
    found = in_memory(layer, name="layer")
    assert found.heads["self_attn"] == 4
    assert found.epsilons["norm1"] == 1e-5


def safetensors(header: Any, data: bytes = b"") -> bytes:
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + data


def spec(*, shape: Any = (2,), at: Any = (0, 8), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": at}


HOSTILE = {
    "truncated": (safetensors({"a": spec()}, b"1234"), "cut off"),
    "header beyond the file": (struct.pack("<Q", 1 << 60) + b"{", "too large"),
    "no JSON": (safetensors(b"{]" * 9), "damaged .*invalid JSON"),
    "deep JSON": (safetensors(b'{"a":' * 100_000), "recursion limit"),
    "not UTF-8": (safetensors(b'{"\xff\xfe":1}'), "invalid UTF-8"),
    "overlapping": (
        safetensors({"a": spec(), "b": spec(at=(4, 12))}, bytes(12)),
        "invalid offset for tensor `b`",
    ),
    "absurd shape": (
        safetensors({"a": spec(shape=[1 << 40] * 9)}, bytes(8)),
        "overflow",
    ),
    "negative shape": (safetensors({"a": spec(shape=[-2])}, bytes(8)), "invalid value"),
    "wrong type": (safetensors({"a": [1, 2]}, bytes(8)), "invalid type"),
    "nothing": (b"", "no checkpoint"),
    "text": (b"just a text, and a long one", "no checkpoint"),
    "cut zip": (b"PK\x03\x04" + bytes(500), "cut off"),
    "cut gguf": (b"GGUF" + struct.pack("<IQQ", 3, 5, 5), "cut off"),
    "huge gguf": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1), "not one we read"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_refused(tmp_path: Path, name: str) -> None:
    data, why = HOSTILE[name]
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    with pytest.raises(InputError, match=why) as error:
        open_checkpoint(path)
    assert "\n" not in str(error.value)


def test_many_tensors_are_refused(tmp_path: Path) -> None:
    item = json.dumps(spec(shape=[0], at=(0, 0)))
    names = ",".join(f'"{i}":{item}' for i in range(201_000))
    (tmp_path / "m.safetensors").write_bytes(safetensors(f"{{{names}}}".encode()))
    with pytest.raises(InputError, match="201000 tensors"):
        open_checkpoint(tmp_path / "m.safetensors")


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.safetensors")
    with pytest.raises(InputError, match="no regular file"):
        open_checkpoint(tmp_path / "m.safetensors")
    with pytest.raises(InputError, match="no regular file"):
        open_checkpoint(sharded_pipe(tmp_path))


def sharded_pipe(folder: Path) -> Path:
    inner = folder / "model"
    sharded(inner if inner.mkdir() is None else inner, state())
    (inner / "model-0.safetensors").unlink()
    os.mkfifo(inner / "model-0.safetensors")
    return inner


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside.safetensors", tmp_path / "model"
    folder.mkdir()
    save_file(state(), outside)
    (folder / "model.safetensors").symlink_to(outside)
    with pytest.raises(InputError, match="link out of"):
        open_checkpoint(folder)


def test_links_of_the_hugging_face_cache_are_followed(tmp_path: Path) -> None:
    folder, blobs = (
        tmp_path / "models--x" / "snapshots" / "abc",
        tmp_path / "models--x" / "blobs",
    )
    folder.mkdir(parents=True)
    blobs.mkdir()
    save_file(state(), blobs / "0f")
    (folder / "model.safetensors").symlink_to(blobs / "0f")
    assert len(open_checkpoint(folder).entries) == 3


@pytest.mark.parametrize("shard", ["../m.safetensors", "/etc/passwd", "", "a\0b"])
def test_shards_outside_the_folder_are_refused(tmp_path: Path, shard: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(InputError, match="outside its folder|no weight_map"):
        open_checkpoint(tmp_path)


def torch_zip(path: Path, content: bytes, *, way: int = zipfile.ZIP_STORED) -> Path:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("archive/data.pkl", content, compress_type=way)
        archive.writestr("archive/version", "3")
    path.write_bytes(made.getvalue())
    return path


def test_pickled_code_does_not_run(tmp_path: Path) -> None:
    marker, path = tmp_path / MARKER, tmp_path / "m.pt"
    torch_zip(path, pickle.dumps({"w": Calls(marker)}, protocol=2))
    with pytest.raises(InputError, match="asks to call .*nothing was run"):
        open_checkpoint(path)
    path.write_bytes(pickle.dumps(Calls(marker)))
    with pytest.raises(InputError, match=str(path)):
        open_checkpoint(path)
    assert not marker.exists()


def test_a_zip_bomb_is_refused(tmp_path: Path) -> None:
    path = torch_zip(tmp_path / "m.pt", bytes(1 << 24), way=zipfile.ZIP_DEFLATED)
    with pytest.raises(InputError, match="compressed"):
        open_checkpoint(path)


def test_an_endless_tuple_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="endless"):
        open_checkpoint(torch_zip(tmp_path / "m.pt", endless()))


def test_a_tensor_larger_than_its_storage_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1).expand(1 << 40)}, tmp_path / "m.pt")
    with pytest.raises(InputError, match="more entries than the file holds"):
        open_checkpoint(tmp_path / "m.pt")


def test_some_mutations(tmp_path: Path) -> None:
    """A sample of ``benchmarks.mutated_checkpoints``: ten thousand files there."""
    found = campaign(tmp_path, 60, seed=1)
    assert found["foreign"] == []
    assert not found["executed"]
    assert sum(c["refused"] for c in found["outcomes"].values()) > 20
    assert np.isfinite(found["slowest"])


def test_projections_without_rows_are_no_attention(tmp_path: Path) -> None:
    """A zeroed shape in a header: nothing to read, and no heads to divide by."""
    rows = {"q": 0, "k": 16, "v": 16, "output": 16}
    state = {
        f"blk.0.attn_{name}.weight": torch.zeros(count, 16)
        for name, count in rows.items()
    }
    (tmp_path / "a.gguf").write_bytes(gguf(state))
    assert attentions(open_checkpoint(tmp_path / "a.gguf")) == []
    found = audit(tmp_path / "a.gguf")
    assert found.verdict.state == "healthy" and not found.reading("projection.G")
