"""A mask is a mask in every format, however a model hides its keys."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from equipoise.auditing.precision.emulation import Bench, Storage, emulated
from equipoise.auditing.precision.page import remarks
from equipoise.auditing.precision.prediction import predicted
from equipoise.auditing.precision.study import range_by_module, study
from equipoise.auditing.subject import output_of

T = 6
FUTURE = torch.ones(T, T, dtype=torch.bool).triu(1)
Mask = Callable[[Tensor], Tensor]


def _in_place(z: Tensor) -> Tensor:
    z[:, FUTURE] = -1e9
    return z


def _then_scaled(z: Tensor) -> Tensor:
    return (z + torch.zeros(T, T, dtype=z.dtype).masked_fill(FUTURE, -1e9)) / 2.0 * 2.0


MASKS: dict[str, Mask] = {
    "masked_fill": lambda z: z.masked_fill(FUTURE, -1e9) + 0.0,
    "added -1e4": lambda z: z + FUTURE * -1e4,
    "added -1e9": lambda z: z + FUTURE * -1e9,
    "added lowest": lambda z: z + FUTURE * torch.finfo(torch.float32).min,
    "added -inf": lambda z: z + torch.zeros(T, T).masked_fill(FUTURE, -math.inf),
    "where": lambda z: torch.where(FUTURE, -1e9, z) + 0.0,
    "written in place": lambda z: _in_place(z) + 0.0,
    "added, then scaled": _then_scaled,
}


class Masked(nn.Module):
    """Attention by hand, its future masked in one of many ways."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.qkv, self.mask = nn.Linear(8, 24), mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        z = self.mask(q @ k.mT / math.sqrt(8))
        return z.softmax(-1) @ v


def masked(mask: Mask) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    return Masked(mask), torch.randn(2, T, 8)


@pytest.mark.parametrize("format", ["fp16", "bf16", "e4m3", "e5m2"])
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_no_number_of_the_format(name: str, format: str) -> None:
    """Every way of masking gives the error that -inf, which nothing rounds, gives."""
    storage = Storage.named(format)
    model, x = masked(MASKS[name])
    exact = Bench(*masked(lambda z: z.masked_fill(FUTURE, -math.inf) + 0.0))
    found = Bench(model, x).mismatch(storage)
    torch.testing.assert_close(found, exact.mismatch(storage), rtol=0.3, atol=0)
    prediction = predicted(model, x, storage=storage)
    assert 0.4 < prediction.total / found < 2.5
    ranges = range_by_module(model, x, storage=storage)
    assert all(use.overflow == 0 for use in ranges.values())


def test_what_hides_a_key_goes_on_hiding_it() -> None:
    model, x = masked(MASKS["added -1e9"])
    model.double()
    with torch.no_grad(), emulated(model, Storage.named("fp16")):
        found = output_of(model, x.double())
    # The first query sees its own key alone, whatever fp16 made of -1e9.
    v = model.qkv(x.double())[:, 0, 16:]
    torch.testing.assert_close(found[:, 0], v, rtol=2e-3, atol=2e-3)


def test_an_activation_as_low_as_a_mask_is_a_number() -> None:
    class Low(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 7e4 - 2e5).clamp(min=-1e9) + 1.0

    ranges = range_by_module(
        Low(), torch.rand(2, 8, dtype=torch.float64), storage=Storage.named("fp16")
    )
    assert ranges[""].overflow == 1.0


def test_precision_of_a_model_that_fp16_cannot_run() -> None:
    """torch refuses to fill fp16 scores with -1e9: the study says so, and goes on."""
    found = study(*masked(MASKS["masked_fill"]), storage=Storage.named("fp16"))
    assert math.isfinite(found.measured) and math.isfinite(found.predicted)
    assert found.native is None and "Half" in found.native_failure
    (line,) = [line for line in remarks(found) if "natively" in line]
    assert line.startswith("the model does not run natively in fp16: ")
    assert not any("out of range" in line for line in remarks(found))
