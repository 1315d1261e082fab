"""The sealed halves, unwatched: their programs train, repeat, and err in silence.

Never run a sealed case under the instrument here: a half is opened once, by hand.
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise_lab.mistakes import case, running

CASES = {one.name: one for one in running.load()}
SEALED = {name: one for name, one in CASES.items() if one.half != "opened"}
SAMPLE = (
    "norms_in_neither_group_of_the_optimiser",
    "codes_without_a_straight_through_gradient",
    "the_previous_token_is_predicted",
    "a_key_padding_mask_of_the_real_tokens",
    "unscaled_only_after_clipping",
    "clipped_by_an_exhausted_generator",
    "adapters_added_after_the_optimiser",
    "a_loss_divided_by_the_loop_and_by_accelerate",
    "low_rank_updates_that_start_at_zero",
    "masked_diffusion_of_text",
    "a_decision_transformer",
    "a_window_that_opens_both_ways",
    "rounded_weights_without_a_straight_gradient",
    "a_chunked_loss_that_shifts_again",
    "a_balance_of_counts_alone",
    "values_clipped_while_they_are_scaled",
    "a_training_step_that_divides_as_lightning_does",
    "gains_of_queries_in_bf16_that_stay",
    "free_of_a_schedule",
    "variance_and_covariance",
    "two_residual_streams",
    "activations_rescaled",
)
"""A second or two each: own loops, transformers, PEFT, Accelerate, controls."""


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """What each backward pass began from, since the case attached its model."""
    seen: list[float] = []
    backward, attach = torch.Tensor.backward, running.Unwatched.__call__

    def recorded(self: torch.Tensor, *args: Any, **options: Any) -> None:
        seen.append(float(self.detach()))
        backward(self, *args, **options)

    def attached(self: running.Unwatched, *args: Any, **options: Any) -> Any:
        seen.clear()
        return attach(self, *args, **options)

    monkeypatch.setattr(torch.Tensor, "backward", recorded)
    monkeypatch.setattr(running.Unwatched, "__call__", attached)
    yield seen


def programs() -> list[tuple[str, bool]]:
    every = [(name, wrong) for name in SAMPLE for wrong in (False, True)]
    return [(n, wrong) for n, wrong in every if not (wrong and SEALED[n].is_control)]


# torch warns of a few of the mistakes, and a warning of our package is an error here.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "wrong"), programs())
def test_a_program_trains_and_repeats(
    name: str, wrong: bool, losses: list[float]
) -> None:
    """Mistakes raise nothing; correct programs learn; both do so bit for bit again."""
    first = running.trained(SEALED[name], wrong=wrong, watched=False)
    seen = list(losses)
    losses.clear()  # a trainer's callback attaches without the call above
    again = running.trained(SEALED[name], wrong=wrong, watched=False)
    assert seen == losses and len(seen) >= case.STEPS
    pairs = zip(sum(first, []), sum(again, []), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert torch.tensor(seen).isfinite().all()
    if not wrong:
        fifth = len(seen) // 5
        assert sum(seen[-fifth:]) < sum(seen[:fifth])


def test_a_twin_and_its_mistake_part_ways(losses: list[float]) -> None:
    for name in SAMPLE[:3]:
        for wrong in (False, True):
            running.trained(SEALED[name], wrong=wrong, watched=False)
            if not wrong:
                right = list(losses)
        assert losses != right, name


def test_two_ranks_without_their_first_broadcast_differ() -> None:
    one = SEALED["ranks_that_start_from_other_weights"]
    for wrong in (False, True):
        first, second = running.trained(one, wrong=wrong, watched=False)
        alike = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert alike is not wrong


@pytest.mark.parametrize("half", ["sealed", "sealed_second"])
def test_a_half_is_as_large_and_as_varied_as_it_was_declared(half: str) -> None:
    here = [one for one in SEALED.values() if one.half == half]
    made = [one for one in here if not one.is_control]
    assert len(made) >= 55 and len(here) - len(made) >= 110
    assert len({code for one in made for code in one.codes}) >= 40
    kinds = {one.kind for one in here}
    assert kinds >= {"transformers", "accelerate", "lightning", "peft", "trl"}
    assert kinds >= {"own loop", "ddp", "fsdp2", "compiled"}


def test_each_of_trainchecks_twenty_has_a_case_or_a_reason() -> None:
    path = Path(case.__file__).with_name("traincheck.toml")
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    assert len(table) == 20
    assert sum(row["found"] for row in table.values()) == 18
    for name, row in table.items():
        assert bool(row["cases"]) is not bool(row.get("why")), name
        assert all(not CASES[one].is_control for one in row["cases"]), name
