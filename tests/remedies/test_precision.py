"""Modules kept in fp32 reach the error that the precision study measures for them."""

import copy

import pytest
import torch
from torch import Tensor, nn

from equipoise.auditing.precision.emulation import (
    Bench,
    Storage,
    all_but,
    relative_error,
)
from equipoise.auditing.subject import output_of
from equipoise.remedies.catalogue import remedy
from equipoise.remedies.precision import kept_in_fp32
from tests.remedies.families import X, a_model

NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
# The residual sums of all blocks, the last norm and the output map: "own operations".
KEPT = {
    "lab": ("", "blocks.0", "blocks.1", "final_norm"),
    "gpt2": (
        *("lm_head", "transformer", "transformer.ln_f"),
        *("transformer.h.0", "transformer.h.1"),
    ),
}


@pytest.mark.parametrize("format", NARROW)
@pytest.mark.parametrize("family", KEPT)
def test_the_error_is_the_predicted_one(family: str, format: str) -> None:
    model = a_model(family).eval()
    bench = Bench(model, X)
    storage = Storage.named(format)
    predicted = bench.mismatch(storage, narrow=all_but(KEPT[family]))
    everything = bench.mismatch(storage)
    assert predicted < 0.9 * everything
    found = _error(model, bench, KEPT[family], NARROW[format])
    # Rounding is not random: 16 channels and 20 tokens leave some tenths.
    assert found == pytest.approx(predicted, rel=0.25)
    assert found < _error(model, bench, (), NARROW[format])


def _error(
    model: nn.Module, bench: Bench, names: tuple[str, ...], narrow: torch.dtype
) -> float:
    twin = copy.deepcopy(model)
    with torch.no_grad(), kept_in_fp32(twin, names, narrow=narrow):
        assert any(p.dtype is narrow for p in twin.parameters())
        found = relative_error(output_of(twin, X), bench.reference)
    assert all(p.dtype is torch.float32 for p in twin.parameters())
    return found


def test_kept_outputs_stay_wide_and_narrow_ones_do_not() -> None:
    model = a_model("lab").eval()
    names = ("blocks.0", "blocks.1.attention_norm")
    remedy("keep_fp32", modules=names, narrow=torch.bfloat16).apply(model)
    seen: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda m, a, out, name=name: seen.update({name: out.dtype})
        )
    model(X)
    assert seen["blocks.0"] is seen["blocks.1.attention_norm"] is torch.float32
    assert seen["blocks.0.attention"] is seen["blocks.1"] is torch.bfloat16
    assert model.blocks[0].attention.q_proj.weight.dtype is torch.bfloat16


def test_under_autocast_kept_modules_leave_it() -> None:
    model = a_model("lab").eval()
    remedy("keep_fp32", modules=("blocks.0.feedforward.up_proj",)).apply(model)
    seen = []
    for block in model.blocks:
        block.feedforward.up_proj.register_forward_hook(
            lambda m, a, out: seen.append(out.dtype)
        )
    with torch.autocast("cpu", torch.bfloat16):
        model(X)
    assert seen == [torch.float32, torch.bfloat16]


class Casts(nn.Module):
    """Asks for the dtype it is given, and casts back to a narrow one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.given = torch.float64

    def forward(self, x: Tensor) -> Tensor:
        self.given = x.dtype
        return x.float().softmax(-1).to(self.inner(x).dtype)


def test_a_kept_module_reads_wide_and_does_not_cast_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Casts())
    remedy("keep_fp32", modules=("1",), narrow=torch.bfloat16).apply(model)
    found = model(torch.eye(4, dtype=torch.bfloat16))
    assert found.dtype is torch.float32 and model[1].given is torch.float32
    assert bool((found != found.bfloat16()).any())
