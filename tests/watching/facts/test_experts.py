"""Experts without tokens are named once chance cannot be the cause."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from equipoise.judging.checks import CHECKS
from equipoise.judging.checks.experts import EXPECTED
from equipoise.judging.facts import Facts
from tests.watching.facts.training import LENGTH, ROWS, WIDTH, Model, causal, found

DEAD = "check.dead_experts"


class Mixture(nn.Module):
    def __init__(self, experts: int, bias: Sequence[float]) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))
        self.register_buffer("bias", torch.tensor(bias))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        p = self.router(flat).softmax(-1)
        chosen = (p + self.get_buffer("bias")).argmax(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            at = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, at, expert(flat[at]) * p[at, number, None])
        return out.view_as(x)


def mixture(bias: Sequence[float]) -> Model:
    torch.manual_seed(1)
    model = Model(causal(), depth=1)
    model.blocks[0].mlp = Mixture(len(bias), bias)
    return model


STEPS = 2 * EXPECTED // (ROWS * LENGTH) + 2


def test_an_expert_that_nothing_is_given_to_is_named(tmp_path: Path) -> None:
    seen = found(mixture([0.0, -9.0]), tmp_path, steps=STEPS)[DEAD]
    assert seen.site == "blocks.0.mlp.router" and seen.severity == "warn"
    assert (seen.params["count"], seen.params["first"]) == (1, 1)
    assert 2 * EXPECTED <= seen.params["tokens"] < 2 * EXPECTED + ROWS * LENGTH  # type: ignore[operator]


def test_too_few_tokens_decide_nothing(tmp_path: Path) -> None:
    assert not found(mixture([0.0, -9.0]), tmp_path, steps=STEPS - 3)


def test_experts_with_tokens_are_not(tmp_path: Path) -> None:
    assert not found(mixture([0.0, 0.0]), tmp_path, steps=STEPS)


def samples(*tokens: Sequence[float]) -> list[Facts]:
    return [
        Facts(step=i, ranks=({"experts": {"routers": {"r": {"tokens": list(t)}}}},))
        for i, t in enumerate(tokens)
    ]


def named(*tokens: Sequence[float]) -> list[float] | None:
    places = CHECKS[DEAD].find(samples(*tokens))
    return None if places is None else [p.params["first"] for p in places]  # type: ignore[misc]


E = EXPECTED


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([(2 * E, 0)], [1]),
        ([(2 * E - 1, 0)], None),
        ([(E, 0), (E, 0)], [1]),
        ([(E, 1), (E, 0)], []),  # chosen once is chosen
        ([(E, 9), (2 * E, 0)], [1]),  # what lies further back does not count
        ([(2 * E, 0), (2 * E, 5)], []),  # it came to life
        ([(0, 0)], None),
        ([(9 * E, 0, 0), (E, 0)], None),  # another number of experts
        ([(float("nan"), 0)], None),
    ],
)
def test_the_stretch_is_as_long_as_chance_needs(
    tokens: list[Sequence[float]], expected: list[float] | None
) -> None:
    assert named(*tokens) == expected


def test_tokens_of_all_ranks_count() -> None:
    one, two = samples((2 * E, 0), (0, 1))
    both = Facts(step=0, ranks=(*one.ranks, *two.ranks))
    assert CHECKS[DEAD].find([both]) == []
