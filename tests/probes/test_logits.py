"""The size of the output, on numbers one can check."""

import pytest
import torch

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
