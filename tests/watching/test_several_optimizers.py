"""Several optimisers, said so: when a step ends, and what is read of all of them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

import equipoise
from equipoise.errors import InputError
from equipoise.probes.optimizer_kinds import update_kinds
from equipoise.watching import Watch
from equipoise.watching.loop.optimizers import Round
from tests.watching.models import TinyModel, batches, declared, objective

Pair = tuple[Optimizer, Optimizer]


def pair(model: TinyModel) -> Pair:
    """Return Muon for the matrices of the blocks, AdamW for the rest."""
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    theirs = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in theirs]
    return Muon(matrices, lr=0.02, weight_decay=0.0), AdamW(rest, lr=1e-3)


def watched(model: nn.Module, given: Any, path: Path, **options: Any) -> Watch:
    with declared():
        run = path / "a.eqp"
        return equipoise.watch(
            model, given, run=run, every=1, strict=True, quiet=True, **options
        )


def series(handle: Watch, quantity: str) -> dict[str, list[float]]:
    found = equipoise.open_run(handle.path).series(quantity)
    return {site: values.tolist() for site, (_, values) in found.items()}


@pytest.mark.parametrize("as_given", [list, tuple, lambda both: [*reversed(both)]])
def test_a_step_ends_when_both_have_stepped(
    as_given: Callable[[Pair], Any], tmp_path: Path
) -> None:
    """Rates, updates and weights of both are read, each update as it was made."""
    model = TinyModel()
    both = pair(model)
    handle = watched(model, as_given(both), tmp_path)
    moved, lost = list[float](), list[float]()
    for batch in batches(3):
        loss = objective(model, batch)
        loss.backward()
        block = [p for p in model.blocks[0].parameters()]
        before = [p.detach().clone() for p in block]
        decayed = [p * (1 - 1e-3 * 0.01) if p.ndim == 1 else p for p in before]
        for optimizer in both:
            optimizer.step()
        steps = [a - b for a, b in zip(block, decayed, strict=True)]
        moved.append(float(nn.utils.get_total_norm(steps)))
        lost.append(loss.item())
        model.zero_grad()
    handle.close()
    assert handle.current_step == 3 and not handle.findings
    assert series(handle, "loss")[""] == pytest.approx(lost)
    # AdamW's update is read without its decay, to which the rounding of w is added.
    assert series(handle, "update.norm")["blocks.0"] == pytest.approx(moved, rel=1e-4)
    assert {"embedding", "head"} <= series(handle, "update.norm").keys()
    first, second = (o.param_groups[0]["lr"] for o in as_given(both))
    assert series(handle, "learning_rate")[""] == pytest.approx([first] * 3)
    assert series(handle, "learning_rate.2")[""] == pytest.approx([second] * 3)


@pytest.mark.parametrize("critic", [1, 3])
def test_phases_are_one_step(critic: int, tmp_path: Path) -> None:
    """Each side has its own loss and clears first: no loss of a phase is lost."""
    model = TinyModel()
    one, two = pair(model)
    handle = watched(model, [one, two], tmp_path)
    sums = []
    for batch in batches(4):
        for _ in range(critic):
            model.zero_grad()
            theirs = objective(model, batch) * 0.5
            theirs.backward()
            two.step()
        model.zero_grad()
        own = objective(model, batch)
        own.backward()
        one.step()
        sums.append(theirs.item() + own.item())
    handle.close()
    # Until all have stepped once, those that do make up the step.
    assert handle.current_step == 4 + critic - 1
    assert series(handle, "loss")[""][-3:] == pytest.approx(sums[-3:])
    assert not [found for found in handle.findings if found.severity != "info"]


def test_one_that_never_steps_ends_no_training(tmp_path: Path) -> None:
    model = TinyModel()
    one, two = pair(model)
    handle = watched(model, [one, two], tmp_path)
    for batch in batches(6):
        objective(model, batch).backward()
        one.step()
        model.zero_grad()
    handle.close()
    assert handle.current_step == 5  # only the first waited for the other
    assert len(series(handle, "loss")[""]) == 5


def optimizers(count: int) -> list[Optimizer]:
    return [AdamW([nn.Parameter(torch.zeros(1))]) for _ in range(count)]


def ends(order: str, count: int = 2) -> Iterator[int]:
    """Yield after how many updates each step of the training ended."""
    given = optimizers(count)
    together, stepped = Round(given), list[int]()
    for letter in order:
        one = given["abc".index(letter)]
        over = together.over(one, stepped)
        stepped.append(id(one))
        if over:
            yield len(stepped)
            stepped.clear()


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("ababab", [2, 2, 2]),
        ("bababa", [2, 2, 2]),
        ("aaaa", [2, 1, 1]),
        ("abaaabab", [2, 4, 2]),  # b steps every so often
        ("aaabaaabaaab", [2, 1, 1, 4, 4]),  # phases
        ("a" * 2 + "b" * 3, [2, 1, 1, 1]),  # one stage after the other
    ],
)
def test_the_last_of_a_round_ends_it(order: str, expected: list[int]) -> None:
    assert list(ends(order)) == expected


def test_of_three_two_may_make_the_step() -> None:
    assert list(ends("abababab", 3)) == [3, 1, 2, 2]
    assert list(ends("abcabcabc", 3)) == [3, 3, 3]


def test_one_that_drops_out_is_waited_for_no_longer() -> None:
    assert list(ends("ab" + "a" * 300))[:4] == [2, 257, 2, 1]


@pytest.mark.parametrize("phases", [False, True])
def test_a_scaler_that_leaves_steps_out(phases: bool, tmp_path: Path) -> None:
    """Its update ends the step only when it was told to step the last one."""
    model = TinyModel()
    both = pair(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
    handle = watched(model, list(both), tmp_path)
    broken = {2: model.head.weight, 4: model.blocks[0].up.weight}
    for number, batch in enumerate(batches(6)):
        for some in [[one] for one in both] if phases else [both]:
            model.zero_grad()
            scaler.scale(objective(model, batch)).backward()
            if number in broken:
                torch.nn.init.constant_(broken[number].grad, torch.inf)
            for optimizer in some:
                scaler.step(optimizer)
            scaler.update()
    handle.close()
    assert scaler.get_scale() == 16.0, "each side was left out once"
    assert handle.current_step == 6


def test_the_model_under_watch_cannot_tell(tmp_path: Path) -> None:
    def trained(watch: bool) -> tuple[list[Tensor], Tensor]:
        torch.manual_seed(0)
        model = TinyModel(dropout=0.1)
        both = pair(model)
        handle = watched(model, list(both), tmp_path) if watch else None
        for batch in batches(4):
            objective(model, batch).backward()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
        if handle is not None:
            handle.close()
        for optimizer in both:
            assert not optimizer._optimizer_step_post_hooks
        weights = [p.detach().clone() for p in model.parameters()]
        return weights, torch.get_rng_state()

    (plain, rng), (seen, after) = trained(False), trained(True)
    assert all(map(torch.equal, plain, seen)) and torch.equal(rng, after)


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        (lambda model: [], {}, "empty list of optimisers"),
        (lambda model: [AdamW(model.parameters()), 3], {}, "int is not a torch.optim"),
        (
            lambda model: list(pair(model)),
            {"autopilot": True},
            "one optimiser.*2 given",
        ),
    ],
)
def test_what_cannot_be_followed_is_said_in_a_line(
    given: Callable[[TinyModel], Any],
    options: dict[str, Any],
    words: str,
    tmp_path: Path,
) -> None:
    model = TinyModel()
    with pytest.raises(InputError, match=words):
        watched(model, given(model), tmp_path, **options)


def test_the_same_ones_again_are_the_same_watch(tmp_path: Path) -> None:
    model = TinyModel()
    both = pair(model)
    handle = watched(model, list(both), tmp_path)
    assert watched(model, tuple(both), tmp_path) is handle
    assert handle.optimizers == both and handle.optimizer is both[0]
    other = watched(model, both[0], tmp_path / "b")
    assert other is not handle and handle.closed
    other.close()


class MuonAdamW(Optimizer):
    """As nanochat's: one class, groups of two kinds."""

    def __init__(self, model: nn.Module) -> None:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim != 2]
        groups = [
            {"params": matrices, "kind": "muon", "lr": 0.02},
            {"params": rest, "kind": "adamw", "lr": 1e-3},
        ]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad.sign())


def test_a_class_that_is_both_says_so_by_its_groups(tmp_path: Path) -> None:
    model = TinyModel()
    optimizer = MuonAdamW(model)
    assert update_kinds(optimizer) == ["orthogonalised", "adaptive"]
    handle = watched(model, optimizer, tmp_path)
    for batch in batches(3):
        objective(model, batch).backward()
        optimizer.step()
        model.zero_grad()
    handle.close()
    run = equipoise.open_run(handle.path)
    assert run.info.details["updates"] == ["adaptive", "orthogonalised"]
    assert set(series(handle, "update.norm")) >= {"blocks.0", "blocks.1", "head"}
    # 0.02 of weights of 0.2: too large for a step that follows the gradient.
    assert not [f for f in run.findings if f.code == "update.too_large"]


@pytest.mark.parametrize(
    ("name", "group", "kind"),
    [
        ("Lion", {}, "signed"),
        ("SignSGD", {}, "signed"),
        ("Adafactor", {}, "factored"),
        ("AdamW8bit", {}, "adaptive"),
        ("SGD", {}, "gradient"),
        ("NorMuon", {}, "orthogonalised"),
        ("SingleDeviceMuonWithAuxAdam", {"use_muon": False}, "adaptive"),
        ("SingleDeviceMuonWithAuxAdam", {"use_muon": True}, "orthogonalised"),
        ("Dion", {"algorithm": "lion"}, "signed"),
        ("Prodigious", {"kind": 3}, ""),
    ],
)
def test_kinds_of_updates(name: str, group: dict[str, Any], kind: str) -> None:
    optimizer = type(name, (AdamW,), {})([nn.Parameter(torch.zeros(1))])
    optimizer.param_groups[0].update(group)
    assert update_kinds(optimizer) == [kind]
