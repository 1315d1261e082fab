"""Codes and scales are read as the numbers they stand for: number by number, slowly."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from equipoise.auditing.audit import audit
from equipoise.auditing.weights.entries import in_memory
from equipoise.auditing.weights.packs import unpacked
from equipoise.errors import InputError

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
NAME = "model.layers.0.mlp.up_proj.weight"


def made(tensors: dict[str, Tensor]) -> Tensor:
    """Return the pack's tensor, read in uneven pieces."""
    checkpoint = unpacked(in_memory(tensors, name="made"))
    assert checkpoint.packs == 1
    (name,) = [n for n in checkpoint.entries if n in {NAME, "experts.gate_up_proj"}]
    entry, pieces, start = checkpoint.entries[name], [], 0
    for size in [1, 2, 5, *[7] * entry.numel]:
        size = min(size, entry.numel - start)
        pieces.append(checkpoint.load(name, start, size))
        start += size
    return torch.cat(pieces).view(entry.shape)


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def code_value(code: int) -> float:
    return math.copysign(E2M1[code & 7], -1 if code & 8 else 1)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize(
    ("shape", "scales", "block"),
    [
        ((300, 200), (3, 2), (128, 128)),
        ((40, 50), (40, 1), (1, 50)),
        ((40, 50), (40,), (1, 50)),
        ((40, 50), (), (40, 50)),
        ((40, 50), (1,), (40, 50)),
        ((3, 40, 50), (3, 40, 1), (1, 50)),
        ((3, 40, 50), (3,), (40, 50)),
    ],
)
@pytest.mark.parametrize("end", ["_scale_inv", "_scale"])
def test_bytes_by_their_scales(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    scales: tuple[int, ...],
    block: tuple[int, int],
    end: str,
) -> None:
    stored = (4 * torch.randn(shape, generator=rng())).to(dtype)
    scale = torch.rand(scales, generator=rng()) + 0.1
    found = made({NAME: stored, f"{NAME}{end}": scale})
    stack = stored.float().reshape(-1, *shape[-2:])
    high, wide = block
    for place in range(0, stack.numel(), 37):
        e, rest = divmod(place, shape[-2] * shape[-1])
        r, c = divmod(rest, shape[-1])
        flat = scale.reshape(-1)
        per_stack = max(1, len(flat) // stack.shape[0])
        across = math.ceil(shape[-1] / wide)
        at = e * per_stack * (len(flat) > 1) * (stack.shape[0] > 1)
        own = flat[min(len(flat) - 1, at + (r // high) * across + c // wide)]
        expected = float(stack[e, r, c]) * float(own)
        assert float(found.view(-1)[place]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", ["modelopt", "compressed", "mxfp4"])
def test_two_fp4_numbers_a_byte(kind: str) -> None:
    codes = torch.randint(0, 256, (6, 32), generator=rng(), dtype=torch.uint8)
    each = 32 if kind == "mxfp4" else 16
    exponents = torch.randint(120, 130, (6, 64 // each), generator=rng())
    scale = torch.rand(6, 64 // each, generator=rng()).to(torch.float8_e4m3fn)
    whole, times = torch.tensor([4.0]), {"modelopt": 4.0, "compressed": 0.25}
    stored = {f"{NAME}_scale": scale, f"{NAME}_packed": codes}
    if kind == "modelopt":
        stored = {NAME: codes, f"{NAME}_scale": scale, f"{NAME}_scale_2": whole}
    elif kind == "compressed":
        stored[f"{NAME}_global_scale"] = whole
    else:
        stored[f"{NAME}_scale"] = exponents.to(torch.uint8)
    found = made(stored)
    assert found.shape == (6, 64)
    for r in range(6):
        for c in range(64):
            byte = int(codes[r, c // 2])
            own = float(scale[r, c // each]) * times.get(kind, 1.0)
            if kind == "mxfp4":
                own = 2.0 ** (int(exponents[r, c // each]) - 127)
            expected = code_value(byte >> 4 if c % 2 else byte & 15) * own
            assert float(found[r, c]) == pytest.approx(expected, rel=1e-6)


def test_experts_of_gpt_oss() -> None:
    blocks = torch.randint(0, 256, (2, 4, 3, 16), generator=rng(), dtype=torch.uint8)
    scales = torch.randint(110, 130, (2, 4, 3), generator=rng(), dtype=torch.uint8)
    stem = "experts.gate_up_proj"
    found = made({f"{stem}_blocks": blocks, f"{stem}_scales": scales})
    assert found.shape == (2, 4, 96)
    for e, r, c in ((0, 0, 0), (1, 3, 95), (1, 2, 33), (0, 3, 64)):
        byte = int(blocks[e, r, c // 32, c % 32 // 2])
        own = 2.0 ** (int(scales[e, r, c // 32]) - 127)
        expected = code_value(byte >> 4 if c % 2 else byte & 15) * own
        assert float(found[e, r, c]) == expected


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_codes_of_bitsandbytes(kind: str, nested: bool) -> None:
    rows, columns, block = 9, 15, 64
    codes = torch.randint(0, 256, (68, 1), generator=rng(), dtype=torch.uint8)
    table = torch.linspace(-1, 1, 16)
    sizes = torch.rand(3, generator=rng())
    state = {"shape": [rows, columns], "blocksize": block, "quant_type": kind}
    tensors = {NAME: codes, f"{NAME}.absmax": sizes, f"{NAME}.quant_map": table}
    if nested:
        inner, outer = torch.rand(256, generator=rng()), torch.tensor([2.0, 3.0])
        chosen = torch.tensor([7, 200, 31], dtype=torch.uint8)
        state |= {"nested_blocksize": 2, "nested_offset": 0.5}
        tensors |= {
            f"{NAME}.absmax": chosen,
            f"{NAME}.nested_absmax": outer,
            f"{NAME}.nested_quant_map": inner,
        }
        sizes = torch.stack(
            [inner[c] * outer[k // 2] + 0.5 for k, c in enumerate(chosen.tolist())]
        )
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    found = made({**tensors, f"{NAME}.quant_state.bitsandbytes__{kind}": text})
    for place in range(rows * columns):
        byte = int(codes[place // 2, 0])
        code = byte & 15 if place % 2 else byte >> 4
        expected = float(table[code]) * float(sizes[place // block])
        assert float(found.view(-1)[place]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"shape": [1e9], "blocksize": 0}', "\xff", "[" * 9000]
)
def test_a_hostile_state_is_one_error(text: str) -> None:
    key = f"{NAME}.quant_state.bitsandbytes__nf4"
    state = torch.tensor(list(text.encode("latin-1")), dtype=torch.uint8)
    tensors = {NAME: torch.zeros(8, 1, dtype=torch.uint8), key: state}
    with pytest.raises(InputError, match="not a state of bitsandbytes"):
        unpacked(in_memory(tensors, name="made"))


def test_scales_that_do_not_fit_leave_the_tensor_as_it_is() -> None:
    odd = {
        NAME: torch.zeros(8, 4).to(torch.float8_e4m3fn),
        f"{NAME}_scale": torch.ones(7),
    }
    assert unpacked(in_memory(odd, name="odd")).packs == 0


def model(dtype: torch.dtype, scale: float | None) -> dict[str, Tensor]:
    """Return two layers of projections in a format, with or without scales."""
    generator, found = rng(), {}
    maps = {f"self_attn.{x}_proj": (64, 64) for x in "qkvo"}
    maps |= {"mlp.up_proj": (128, 64), "mlp.down_proj": (64, 128)}
    for layer in range(2):
        stem = f"model.layers.{layer}"
        for name, shape in maps.items():
            weight = torch.randn(shape, generator=generator) * 0.02
            key = f"{stem}.{name}.weight"
            found[key] = (weight / (scale or 1.0)).to(dtype)
            if scale:
                found[f"{key}_scale"] = torch.tensor(scale)
        found[f"{stem}.input_layernorm.weight"] = torch.ones(64, dtype=torch.float32)
    return found


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("scale", [None, 1e-3])
def test_an_audit_reads_fp8(
    tmp_path: Path, dtype: torch.dtype, scale: float | None
) -> None:
    save_file(model(dtype, scale), tmp_path / "model.safetensors")
    found = audit(tmp_path / "model.safetensors")
    sizes = found.reading("weights.rms")
    assert sizes[f"{NAME}"][0] == pytest.approx(0.02, rel=0.05)
    assert found.verdict.state != "not judged"
    assert any("codes and scales" in fact for fact in found.facts) == bool(scale)


def test_codes_that_cannot_be_read_are_no_healthy_model(tmp_path: Path) -> None:
    """GPTQ: nearly all of the model is in int32 words of eight numbers."""
    tensors = model(torch.float16, None)
    words = {
        f"{name.removesuffix('weight')}qweight": torch.zeros(64, 64, dtype=torch.int32)
        for name in tensors
        if "proj" in name
    }
    own = {name: x for name, x in tensors.items() if "norm" in name}
    save_file({**own, **words}, tmp_path / "model.safetensors")
    found = audit(tmp_path / "model.safetensors")
    assert found.verdict.state == "not judged"
    assert any("packed and were not read" in fact for fact in found.facts)
