"""Router entropy and load, and the size of the output, on numbers one can check."""

import math

import pytest
import torch
from torch import nn

from equipoise.probes.logits import (
    OutputLogits,
    RouterLoad,
    output_logits,
    router_entropy,
    router_load,
)
from tests.probes.reading import gpt, measured, tokens


def test_an_undecided_router_has_the_entropy_of_a_die() -> None:
    assert router_entropy(torch.zeros(5, 6)).item() == pytest.approx(math.log(6))
    assert router_entropy(100 * torch.eye(4)).item() == pytest.approx(0, abs=1e-6)


def test_load_counts_assignments() -> None:
    logits = torch.tensor([[9.0, 1.0, 0.0], [9.0, 0.0, 1.0], [9.0, 1.0, 0.0]])
    assert router_load(logits, top_k=1).tolist() == [1, 0, 0]
    both = router_load(logits, top_k=2)
    torch.testing.assert_close(both, torch.tensor([3 / 6, 2 / 6, 1 / 6]))


def test_a_router_is_read_at_its_output(rng: torch.Generator) -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    x = torch.randn(2, 5, 4, generator=rng)
    found = measured(model, [RouterLoad()], x, routers={"0": (model[0], 1)})
    p = model(x).double().softmax(-1).flatten(0, 1)
    entropy = -(p * p.log()).sum(-1).mean().item()
    assert found["0", "router.entropy"].item() == pytest.approx(entropy, rel=1e-6)
    counted = torch.bincount(p.argmax(-1), minlength=3) / 10
    torch.testing.assert_close(found["0", "router.load"], counted)


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
