"""Checks of clipping, schedules and optimisers: mistakes, and what looks like them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as schedules

from equipoise.judging.checks import CHECKS
from equipoise.judging.facts import Facts
from tests.watching.checks.loops import Loop, Watched, cases, checked, loss, trained
from tests.watching.models import TinyModel, batches


def scaled(
    watch: Watched,
    *,
    unscale: bool,
    factor: float = 1024.0,
    limit: Callable[[float], float] = lambda factor: 1.0,
) -> None:
    model = TinyModel()
    optimizer = SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=factor)
    watch(model, optimizer)
    for batch in batches(4):
        optimizer.zero_grad()
        scaler.scale(loss(model, batch)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), limit(scaler.get_scale()))
        scaler.step(optimizer)
        scaler.update()


def clipped_while_scaled(watch: Watched) -> None:
    scaled(watch, unscale=False)


def clipped_by(watch: Watched, norm: Callable[[TinyModel], torch.Tensor]) -> None:
    model = TinyModel()
    optimizer = SGD(model.parameters(), lr=0.05)

    def clip(step: int) -> None:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm(model))

    trained(watch, model, optimizer, before=clip)


def norm_of(some: Any, order: float = 2.0) -> torch.Tensor:
    grads = [p.grad for p in some if p.grad is not None]
    return torch.nn.utils.get_total_norm(grads, order)


def clipped_by_a_part(watch: Watched) -> None:
    clipped_by(watch, lambda model: norm_of(model.blocks[0].parameters()))


def clipped_after_the_update(watch: Watched) -> None:
    model = TinyModel()
    optimizer = SGD(model.parameters(), lr=0.05)
    trained(
        watch,
        model,
        optimizer,
        after=lambda step: clip_grad_norm_(model.parameters(), 0.1),
    )


def moving(
    watch: Watched,
    make: Callable[[Optimizer], Any],
    *,
    moves: int = 1,
    steps: int = 10,
    own: bool = True,
    step: Callable[[Any, int], Any] = lambda schedule, number: schedule.step(),
) -> None:
    model = TinyModel()
    optimizer = SGD(model.parameters(), lr=0.05)
    theirs = optimizer if own else SGD(model.parameters(), lr=0.05)
    schedule = make(theirs)

    def after(number: int) -> None:
        for _ in range(moves):
            step(schedule, number)

    trained(watch, model, optimizer, after=after, steps=steps)


def linear(optimizer: Optimizer) -> Any:
    return schedules.LinearLR(optimizer, 1.0, 0.1, total_iters=60)


def moved_eight_times(watch: Watched) -> None:
    moving(watch, linear, moves=8)


def schedule_of_another(watch: Watched) -> None:
    moving(watch, linear, own=False)


def begun_again(watch: Watched) -> None:
    """As at a resume that does not load the schedule's state."""
    model = TinyModel()
    optimizer = SGD(model.parameters(), lr=0.05)
    schedule = schedules.CosineAnnealingLR(optimizer, 20)
    watch(model, optimizer)
    for step, batch in enumerate(batches(10)):
        if step == 6:
            optimizer.param_groups[0]["lr"] = 0.05
            schedule = schedules.CosineAnnealingLR(optimizer, 20)
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        schedule.step()


def rate_of_zero(watch: Watched) -> None:
    model = TinyModel()
    trained(watch, model, SGD(model.parameters(), lr=0.0))


def decayed_to_zero_too_soon(watch: Watched) -> None:
    def make(optimizer: Optimizer) -> Any:
        return schedules.LinearLR(optimizer, 1.0, 0.0, total_iters=4)

    moving(watch, make, steps=24)


def another_steps(watch: Watched) -> None:
    model = TinyModel()
    named, stepping = (SGD(model.parameters(), lr=0.05) for _ in range(2))
    watch(model, named)
    for batch in batches(6):
        model.zero_grad()
        loss(model, batch).backward()
        stepping.step()


def clipped_nothing(watch: Watched) -> None:
    model = TinyModel()
    weights = model.parameters()
    optimizer = SGD(weights, lr=0.05)
    clip = lambda step: clip_grad_norm_(weights, 0.1)  # noqa: E731
    trained(watch, model, optimizer, before=clip)


MISTAKES = {
    clipped_nothing: ("check.clip_norm", 0),
    clipped_while_scaled: ("check.clip_before_unscale", 0),
    clipped_by_a_part: ("check.clip_norm", 0),
    clipped_after_the_update: ("check.clip_unused", 1),
    moved_eight_times: ("check.schedule", 2),
    schedule_of_another: ("check.schedule", 2),
    begun_again: ("check.schedule", 6),
    rate_of_zero: ("check.schedule", 2),
    decayed_to_zero_too_soon: ("check.schedule", 19),
    another_steps: ("check.other_optimizer", 1),
}


@cases(*MISTAKES)
@pytest.mark.filterwarnings("ignore:Detected call", "ignore:`parameters` is")
def test_a_mistake_is_named_as_soon_as_it_can_be(loop: Loop, tmp_path: Path) -> None:
    code, step = MISTAKES[loop]
    assert checked(loop, tmp_path).get(code) == step


def unscaled_first(watch: Watched) -> None:
    scaled(watch, unscale=True)


def factor_of_one(watch: Watched) -> None:
    scaled(watch, unscale=False, factor=1.0)


def limit_that_is_scaled_too(watch: Watched) -> None:
    scaled(watch, unscale=False, limit=lambda factor: 1.0 * factor)


def each_group_by_its_own(watch: Watched) -> None:
    model = TinyModel()
    optimizer = SGD(model.parameters(), lr=0.05)

    def clip(step: int) -> None:
        for part in (model.blocks, model.head, model.embedding):
            clip_grad_norm_(part.parameters(), 0.1)

    trained(watch, model, optimizer, before=clip)


def each_group_by_the_norm_of_all(watch: Watched) -> None:
    model = TinyModel()
    optimizer = SGD(model.parameters(), lr=0.05)

    def clip(step: int) -> None:
        norm = norm_of(model.parameters())
        for part in (model.blocks, model.head):
            torch.nn.utils.clip_grads_with_norm_(part.parameters(), 0.1, norm)

    trained(watch, model, optimizer, before=clip)


def clipped_by_the_largest_entry(watch: Watched) -> None:
    clipped_by(watch, lambda model: norm_of(model.parameters(), torch.inf))


def clipped_in_another_order(watch: Watched) -> None:
    model = TinyModel()
    optimizer = SGD(model.parameters(), lr=0.05)
    infinity = torch.inf
    trained(
        watch,
        model,
        optimizer,
        before=lambda step: clip_grad_norm_(model.parameters(), 0.1, infinity),
    )


def measured_after_the_update(watch: Watched) -> None:
    """A call with an infinite limit clips nothing: it only measures."""
    model = TinyModel()
    optimizer = SGD(model.parameters(), lr=0.05)
    limit = torch.inf
    trained(
        watch,
        model,
        optimizer,
        after=lambda step: clip_grad_norm_(model.parameters(), limit),
    )


def clipped_within_backward(watch: Watched) -> None:
    model = TinyModel()
    optimizer = SGD(model.parameters(), lr=0.05)

    def clip(parameter: torch.Tensor) -> None:
        clip_grad_norm_([parameter], 0.1)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(clip)
    trained(watch, model, optimizer)


def another_model_is_clipped(watch: Watched) -> None:
    model, judge = TinyModel(), nn.Linear(3, 3)
    judge(torch.randn(2, 3)).sum().backward()
    optimizer = SGD(model.parameters(), lr=0.05)
    trained(
        watch,
        model,
        optimizer,
        after=lambda step: clip_grad_norm_(judge.parameters(), 0.1),
    )


def one_move_an_update(watch: Watched) -> None:
    moving(watch, linear)


def one_move_for_each_micro_batch(watch: Watched) -> None:
    model = TinyModel()
    optimizer = SGD(model.parameters(), lr=0.05)
    schedule = linear(optimizer)
    watch(model, optimizer)
    for step, batch in enumerate(batches(16)):
        (loss(model, batch) / 2).backward()
        schedule.step()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


def chained(watch: Watched) -> None:
    def make(optimizer: Optimizer) -> Any:
        parts = [schedules.ExponentialLR(optimizer, 0.9), linear(optimizer)]
        return schedules.ChainedScheduler(parts, optimizer)

    moving(watch, make)


def one_after_the_other(watch: Watched) -> None:
    def make(optimizer: Optimizer) -> Any:
        warm = schedules.LinearLR(optimizer, 0.1, 1.0, total_iters=3)
        return schedules.SequentialLR(
            optimizer, [warm, schedules.CosineAnnealingLR(optimizer, 20)], [3]
        )

    moving(watch, make)


def two_of_one_optimiser(watch: Watched) -> None:
    """Each moves once: a warm-up, and the decay beside it."""

    def make(optimizer: Optimizer) -> Any:
        return [linear(optimizer), schedules.ExponentialLR(optimizer, 0.99)]

    moving(watch, make, step=lambda pair, number: [one.step() for one in pair])


def once_an_epoch(watch: Watched) -> None:
    moving(watch, linear, step=lambda s, number: s.step() if number % 4 == 3 else None)


def on_a_plateau(watch: Watched) -> None:
    moving(
        watch,
        lambda optimizer: schedules.ReduceLROnPlateau(optimizer, patience=1),
        step=lambda schedule, number: schedule.step(1.0),
    )


def warm_restarts(watch: Watched) -> None:
    moving(watch, lambda o: schedules.CosineAnnealingWarmRestarts(o, 3))


def begun_again_when_over(watch: Watched) -> None:
    model = TinyModel()
    optimizer = SGD(model.parameters(), lr=0.05)
    schedule = schedules.CosineAnnealingLR(optimizer, 4, eta_min=0.01)
    watch(model, optimizer)
    for step, batch in enumerate(batches(10)):
        if step == 5:
            optimizer.param_groups[0]["lr"] = 0.05
            schedule = schedules.CosineAnnealingLR(optimizer, 4, eta_min=0.01)
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        schedule.step()


def resumed_with_its_state(watch: Watched) -> None:
    model = TinyModel()
    optimizer = SGD(model.parameters(), lr=0.05)
    schedule = schedules.CosineAnnealingLR(optimizer, 20)
    watch(model, optimizer)
    for step, batch in enumerate(batches(10)):
        if step == 6:
            at, rate = schedule.state_dict(), optimizer.param_groups[0]["lr"]
            schedule = schedules.CosineAnnealingLR(optimizer, 20)
            schedule.load_state_dict(at)
            optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        schedule.step()


def caught_up(watch: Watched) -> None:
    """Moves that bring a new schedule to where the old one stood."""
    model = TinyModel()
    optimizer = SGD(model.parameters(), lr=0.05)
    schedule = linear(optimizer)
    watch(model, optimizer)
    for _ in range(20):
        schedule.step()
    for batch in batches(6):
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        schedule.step()


def warm_up_from_zero(watch: Watched) -> None:
    moving(watch, lambda o: schedules.LambdaLR(o, lambda step: step / 100))


def decayed_to_zero_at_the_end(watch: Watched) -> None:
    def make(optimizer: Optimizer) -> Any:
        return schedules.LinearLR(optimizer, 1.0, 0.0, total_iters=4)

    moving(watch, make, steps=12)


class Lookahead(Optimizer):
    """Wraps another optimiser, whose groups it shares."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__([p for g in inner.param_groups for p in g["params"]], {})
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def schedule_of_what_is_inside(watch: Watched) -> None:
    model = TinyModel()
    inner = SGD(model.parameters(), lr=0.05)
    outer, schedule = Lookahead(inner), linear(inner)
    trained(watch, model, outer, after=lambda step: schedule.step())


def only_the_inner_one_steps(watch: Watched) -> None:
    """As SAM's second step does."""
    model = TinyModel()
    inner = SGD(model.parameters(), lr=0.05)
    watch(model, Lookahead(inner))
    for batch in batches(6):
        model.zero_grad()
        loss(model, batch).backward()
        inner.step()


def taken_over(watch: Watched) -> None:
    model = TinyModel()
    optimizer = SGD(model.parameters(), lr=0.05)
    watch(model, optimizer)
    for step, batch in enumerate(batches(8)):
        if step == 3:
            optimizer = SGD(model.parameters(), lr=0.01)
        model.zero_grad()
        loss(model, batch).backward()
        optimizer.step()


def another_models_schedule(watch: Watched) -> None:
    model, judge = TinyModel(), nn.Linear(2, 2)
    schedule = linear(SGD(judge.parameters(), lr=0.1))
    trained(watch, model, after=lambda step: [schedule.step() for _ in range(5)])


def one_group_is_empty(watch: Watched) -> None:
    model = TinyModel()

    def clip(step: int) -> None:
        clip_grad_norm_([], 0.1)
        clip_grad_norm_(model.parameters(), 0.1)

    trained(watch, model, SGD(model.parameters(), lr=0.05), before=clip)


@cases(
    one_group_is_empty,
    unscaled_first,
    factor_of_one,
    limit_that_is_scaled_too,
    each_group_by_its_own,
    each_group_by_the_norm_of_all,
    clipped_by_the_largest_entry,
    clipped_in_another_order,
    measured_after_the_update,
    clipped_within_backward,
    another_model_is_clipped,
    one_move_an_update,
    one_move_for_each_micro_batch,
    chained,
    one_after_the_other,
    two_of_one_optimiser,
    once_an_epoch,
    on_a_plateau,
    warm_restarts,
    begun_again_when_over,
    resumed_with_its_state,
    caught_up,
    warm_up_from_zero,
    decayed_to_zero_at_the_end,
    schedule_of_what_is_inside,
    only_the_inner_one_steps,
    taken_over,
    another_models_schedule,
)
@pytest.mark.filterwarnings("ignore")
def test_nothing_is_said_of_a_correct_loop(loop: Loop, tmp_path: Path) -> None:
    assert checked(loop, tmp_path) == {}


def of_ranks(*each: dict[str, Any]) -> tuple[Facts]:
    ranks = tuple({"replicas": one} for one in each)
    return (Facts(step=3, ranks=ranks),)


def rank(weight: float, gradient: float, *, wrapper: int, model: int) -> dict[str, Any]:
    return {
        "wrapper": "DistributedDataParallel",
        "names": ["head.weight"],
        "weights": [weight],
        "gradients": [gradient],
        "called": {"wrapper": wrapper, "model": model},
    }


@pytest.mark.parametrize(
    ("weight", "gradient", "wrapper", "expected"),
    [
        (1.0, 2.0, 1, []),
        (1.5, 2.0, 1, ["check.replicas_differ"]),
        (1.0, 2.5, 0, ["check.wrapper_bypassed"]),
        (1.0, 2.0, 0, []),  # the loop averages gradients itself
        (1.0, 2.5, 1, []),  # read before they were reduced
        (torch.nan, 2.0, 1, []),  # a NaN says nothing of replicas
    ],
)
def test_ranks(
    weight: float, gradient: float, wrapper: int, expected: list[str]
) -> None:
    both = [rank(1.0, 2.0, wrapper=wrapper, model=1)]
    both.append(rank(weight, gradient, wrapper=wrapper, model=1))
    codes = ("check.replicas_differ", "check.wrapper_bypassed")
    facts = of_ranks(*both)
    assert [code for code in codes if CHECKS[code].find(facts)] == expected


def alone(weight: float, gradient: float, *, one_mesh: bool = False) -> dict[str, Any]:
    """Return the facts of a rank without a wrapper."""
    seen = rank(weight, gradient, wrapper=0, model=0)
    return {**seen, "wrapper": "", "one_mesh": one_mesh}


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ((1.0, 2.0), (1.5, 2.0), True),  # gradients are averaged by hand
        ((1.5, 2.5), (1.5, 2.5), False),  # local steps, or other parts of a model
        ((1.0, 2.5), (1.5, 2.5), False),  # local steps begin alike
        ((1.5, 0.0), (1.5, 0.0), False),  # zeros are equal everywhere
    ],
)
def test_ranks_without_a_wrapper(before: Any, now: Any, expected: bool) -> None:
    gradient = 0.0 if now[1] == 0 else 2.0
    facts = [
        of_ranks(alone(1.0, gradient), alone(*other))[0] for other in (before, now)
    ]
    assert bool(CHECKS["check.replicas_differ"].find(facts)) == expected


@pytest.mark.parametrize("before", [1.0, 1.5])
def test_what_was_alike_beside_shards_stays_alike(before: float) -> None:
    one = {"gradient": 2.0, "one_mesh": True}
    other = {"gradient": 2.5, "one_mesh": True}
    facts = [of_ranks(alone(1.0, **one), alone(x, **other))[0] for x in (before, 1.5)]
    found = CHECKS["check.replicas_differ"].find(facts)
    assert bool(found) == (before == 1.0)  # experts of each rank differ from the start


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("norm", [1.0, 1.5])
def test_shards_are_clipped_by_one_norm(norm: float, sharded: bool) -> None:
    def clipping(x: float) -> dict[str, Any]:
        call = {"norm": x, "sharded": sharded, "largest": 0.5}
        return {"calls": 1, "passes": 1, "of_nothing": 0, "each": [call]}

    ranks = tuple({"clipping": clipping(x)} for x in (1.0, norm))
    found = CHECKS["check.clip_norm"].find((Facts(step=0, ranks=ranks),))
    assert bool(found) == (sharded and norm != 1.0)


def test_accelerates_schedule_moves_once_for_each_process() -> None:
    moves = {
        "class": "LinearLR",
        "total": 8,
        "each": [2, 2, 2],
        "passes": [1, 1, 1],
        "updates": 4,
        "instead": 0,
        "instead_rates": 0,
    }
    section = {"moves": [moves], "rates": []}
    find = CHECKS["check.schedule"].find
    for ranks, found in ((1, 1), (2, 0)):
        facts = Facts(step=3, ranks=({"schedule": section},) * ranks)
        assert len(list(find((facts,)) or ())) == found
