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


@pytest.mark.parametrize("narrow_products", [False, True])
@pytest.mark.parametrize("format", NARROW)
@pytest.mark.parametrize("family", KEPT)
def test_the_error_is_the_predicted_one(
    family: str, format: str, narrow_products: bool
) -> None:
    model = a_model(family).eval()
    bench = Bench(model, X)
    options = {"fused": True, "narrow_products": narrow_products}
    storage = Storage.named(format, **options)
    predicted = bench.mismatch(storage, narrow=all_but(KEPT[family]))
    everything = bench.mismatch(storage)
    # With narrow products these names may help a model so small by nothing.
    assert narrow_products or predicted < 0.95 * everything
    found = _error(
        model, bench, KEPT[family], NARROW[format], narrow_products=narrow_products
    )
    # Rounding is not random: 16 channels and 20 tokens leave some tenths.
    assert found == pytest.approx(predicted, rel=0.25)
    assert narrow_products or found < _error(model, bench, (), NARROW[format])


def _error(
    model: nn.Module,
    bench: Bench,
    names: tuple[str, ...],
    narrow: torch.dtype,
    **options: bool,
) -> float:
    twin = copy.deepcopy(model)
    with torch.no_grad(), kept_in_fp32(twin, names, narrow=narrow, **options):
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


def test_narrow_products_read_no_wide_number() -> None:
    """The kept map of a module multiplies rounded numbers and leaves its sum wide."""
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8))
    norm, kept, last = copy.deepcopy(model)
    x = torch.randn(4, 8)
    names, narrow = ("0", "1"), torch.bfloat16
    remedy("keep_fp32", modules=names, narrow=narrow, narrow_products=True).apply(model)

    def fl(y: Tensor) -> Tensor:
        return y.detach().to(narrow).float()

    y = nn.functional.linear(fl(norm(x)), fl(kept.weight), fl(kept.bias))
    z = nn.functional.linear(fl(y), fl(last.weight), fl(last.bias))
    assert model[:2](x).dtype is torch.float32
    torch.testing.assert_close(model[:2](x), y, rtol=1e-6, atol=1e-6)
    # One rounding of the last sum: its order may differ, so one unit in the last place.
    torch.testing.assert_close(model(x).float(), fl(z), rtol=2**-7, atol=1e-6)


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
