"""The indicators of Baek's papers, measured on a model of the laboratory."""

import pytest
import torch
from torch import nn

from equipoise.auditing.precision.emulation import Bench, Storage
from equipoise.errors import InputError
from equipoise.numerics.formats import FORMATS
from equipoise_lab.models import GPT, GPTConfig
from equipoise_lab.studies.fragility.published import published_blocks

BF16 = Storage.named("bf16")


def test_both_overstate_the_error() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=16, depth=2, heads=2, context=16)).eval()
    ids = torch.randint(0, 256, (1, 12))
    found = published_blocks(model, ids)
    assert len(found.v1) == len(found.v2) == 2
    # Both claim to predict a relative error; both are larger than the truth, v1 by far.
    truth = Bench(model, ids).mismatch(BF16)
    assert found.v1_prediction(FORMATS["bf16"]) > 100 * truth
    assert found.v2_prediction(FORMATS["bf16"]) > truth
    assert [parts.norms[1] for parts in found.parts] == [
        f"blocks.{i}.feedforward_norm" for i in (0, 1)
    ]


def test_published_indicators_need_the_blocks_of_the_papers() -> None:
    with pytest.raises(InputError, match="Linear has no blocks we know"):
        published_blocks(nn.Linear(2, 2), torch.zeros(1, 2))
    stack = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2)) for _ in range(2)])
    with pytest.raises(InputError, match="0 has no attention with four maps"):
        published_blocks(stack, torch.zeros(1, 2))
