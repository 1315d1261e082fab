"""The size of the output, on numbers one can check."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from equipoise.probes.logits import OutputLogits, output_logits
from tests.probes.reading import gpt, measured, tokens


def test_logits_are_those_of_the_output() -> None:
    model = gpt()
    found = measured(model, [OutputLogits()])
    logits = model(tokens())
    rms = logits.double().square().mean().sqrt().item()
    assert found["", "output.logit_norm"].item() == pytest.approx(rms, rel=1e-5)
    assert found["", "output.logit_max"].item() == logits.abs().max().item()


def test_where_the_logits_are() -> None:
    class Output:
        logits = torch.ones(1, 2, 3)

    assert output_logits(Output()) is Output.logits
    assert output_logits((torch.tensor(1.0), Output.logits)) is Output.logits
    assert output_logits("text") is None


class LossInside(nn.Module):
    """Returns its loss alone, as a model for training may; in chunks if asked."""

    def __init__(self, *, chunks: int = 1) -> None:
        super().__init__()
        self.gpt, self.chunks = gpt(), chunks

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        z, y = self.gpt(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        pairs = zip(z.chunk(self.chunks), y.chunk(self.chunks), strict=True)
        each = [F.cross_entropy(a, b, reduction="sum") for a, b in pairs]
        return torch.stack(each).sum() / len(y)


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_model_that_returns_a_loss_is_read_where_the_loss_is_called(
    chunks: int,
) -> None:
    model = LossInside(chunks=chunks)
    found = measured(model, [OutputLogits()])
    logits = model.gpt(tokens())[:, :-1].double()
    rms = logits.square().mean().sqrt().item()
    assert found["", "output.logit_norm"].item() == pytest.approx(rms, rel=1e-5)
    most = found["", "output.logit_max"].item()
    assert most == pytest.approx(logits.abs().max().item(), rel=1e-6)


def test_a_loss_beside_logits_that_are_returned_is_not_counted_again() -> None:
    class Both(LossInside):
        def forward(self, ids: torch.Tensor) -> Any:
            super().forward(ids)
            return self.gpt(ids)

    model = Both()
    found = measured(model, [OutputLogits()])
    rms = model.gpt(tokens()).double().square().mean().sqrt().item()
    assert found["", "output.logit_norm"].item() == pytest.approx(rms, rel=1e-5)
