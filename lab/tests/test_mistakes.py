"""Cases run as programs: on one rank or several, unchanged when watched."""

import pytest
import torch

from equipoise_lab.mistakes import running
from equipoise_lab.mistakes.case import Case
from lab.benchmarks import mistakes

OPENED = {case.name: case for case in running.load("opened")}


def same(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    assert [len(model) for model in one] == [len(model) for model in other]
    pairs = zip(sum(one, []), sum(other, []), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("wrong", [False, True])
def test_two_ranks_run_as_processes_of_their_own(wrong: bool) -> None:
    """Both ranks' weights come back; only with the mistake do they drift apart."""
    case = OPENED["the_module_is_called_instead_of_its_wrapper"]
    first, second = running.trained(case, wrong=wrong, watched=False)
    assert same([first], [second]) is not wrong


def test_a_group_is_the_same_when_it_is_watched() -> None:
    case = OPENED["a_decoder_in_shards"]
    alone = running.trained(case, wrong=False, watched=False)
    assert len(alone) == 2 and not same(alone[:1], alone[1:])
    assert same(alone, running.trained(case, wrong=False, watched=True))


def test_an_outcome_of_two_ranks_is_read_from_their_run() -> None:
    case = OPENED["a_decoder_in_shards"]
    found = running.outcome(case, wrong=False)
    assert not found.error and found.state and found.seconds > 1


def test_what_a_rank_raises_is_reported() -> None:
    def stops(wrong: bool, watch: object) -> None:
        raise AssertionError("never run: the ranks look the case up by its name")

    missing = Case(
        name="no_such_case", half="opened", codes=(), source="", ranks=2, run=stops
    )
    assert running.outcome(missing, wrong=False).error == "KeyError: 'no_such_case'"


def test_the_benchmark_counts_what_was_said() -> None:
    """One mistake named late, a twin that was warned: both are in the record."""
    cases = [OPENED["labels_shifted_twice"], OPENED["accumulation"]]
    done = [
        running.Outcome(
            case=cases[0].name,
            wrong=True,
            state="at risk",
            first={"check.labels_shift": 3, "gradient.vanishing": 9},
        ),
        running.Outcome(
            case=cases[0].name,
            wrong=False,
            state="at risk",
            first={"check.rows_mixed": 5},
        ),
        running.Outcome(case=cases[1].name, wrong=False, state="healthy"),
    ]
    rows = {row["area"]: row for row in mistakes.table(cases, done)}
    assert list(rows) == ["loss", "controls", "all"]
    assert rows["loss"]["named"] == "1/1 [3, 100] %"
    assert rows["all"]["by step 2"] == "0/1 [0, 98] %"
    assert rows["all"]["correct, warned by a check"] == "1/2 [1, 99] %"
    record = mistakes.case_record(cases[0], done)
    assert record["named"] and record["by step"] == 3
    assert record["other findings"] == {"gradient.vanishing": 9}
    assert record["correct program"]["warnings"] == {"check.rows_mixed": 5}


def test_a_case_that_is_not_there_is_refused() -> None:
    with pytest.raises(SystemExit, match="no such case: gradients_cleared"):
        mistakes.main(["gradients_cleared"])


@pytest.mark.parametrize("name", mistakes.SAMPLE)
def test_a_sample_of_the_benchmark_is_named_and_its_twins_are_not(name: str) -> None:
    """The few fast cases of CI: one program each time, in a second."""
    case = OPENED[name]
    twin = running.outcome(case, wrong=False)
    assert not [code for code in twin.first if code.startswith("check.")]
    if not case.is_control:
        found = running.outcome(case, wrong=True)
        assert found.named(case) and not found.error
        assert min(found.first[c] for c in case.codes if c in found.first) <= 2
