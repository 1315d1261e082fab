"""Legal loops that look odd: recorded as they are, never ended by a guess of ours."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

import equipoise
from equipoise.watching import Watch
from tests.watching.models import WIDTH, TinyModel, batches, declared, objective


def watched(model: nn.Module, optimizer: Any, path: Path, **options: Any) -> Watch:
    with declared():
        return equipoise.watch(model, optimizer, run=path / "a.eqp", **options)


def losses(handle: Watch) -> tuple[list[int], list[float]]:
    steps, values = equipoise.open_run(handle.path).series("loss")[""]
    return list(steps), values.tolist()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_lbfgs_records_its_last_evaluation(set_to_none: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TinyModel().double()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)  # max_iter is 20
    handle = watched(model, optimizer, tmp_path, every=1)
    last = []
    for batch in batches(2):
        evaluated: list[float] = []

        def closure(batch: Tensor = batch, to: list[float] = evaluated) -> Tensor:
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = objective(model, batch)
            loss.backward()
            to.append(loss.item())
            return loss

        optimizer.step(closure)
        assert len(evaluated) > 8
        last.append(evaluated[-1])
    handle.close()
    assert losses(handle) == ([0, 1], last)
    assert not [f for f in handle.findings if f.belongs_to("watch.silent")]
    moved = equipoise.open_run(handle.path).series("update.norm")["blocks.0"]
    assert list(moved[0]) == [0, 1]
    assert handle._step.cleared == 0, "an evaluation is no batch that was left out"


def test_an_update_whose_pass_runs_in_a_closure_is_read(tmp_path: Path) -> None:
    """As Lightning does: no gradient is there before the step, nor any pass."""
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = watched(model, optimizer, tmp_path, every=1)
    moved = []
    for batch in batches(3):

        def closure(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            loss = objective(model, batch)
            loss.backward()
            return loss

        before = nn.utils.parameters_to_vector(model.blocks[1].parameters()).detach()
        optimizer.step(closure=closure)
        after = nn.utils.parameters_to_vector(model.blocks[1].parameters()).detach()
        moved.append((after - before).norm().item())
    handle.close()
    steps, read = equipoise.open_run(handle.path).series("update.norm")["blocks.1"]
    assert list(steps) == [0, 1, 2]
    assert read.tolist() == pytest.approx(moved, rel=1e-5)  # float32 sums


def test_backward_passes_before_the_first_step(tmp_path: Path) -> None:
    """A noise scale or a Fisher diagonal is measured before training starts."""
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = watched(model, optimizer, tmp_path, every=1)
    for batch in batches(8):
        objective(model, batch).backward()
        optimizer.zero_grad()
    loss = objective(model, batches(1)[0])
    loss.backward()
    optimizer.step()
    handle.close()
    assert losses(handle) == ([0], [pytest.approx(loss.item())])
    assert not handle.findings


@pytest.mark.parametrize("to_none", [True, False])
def test_steps_that_the_user_leaves_out(to_none: bool, tmp_path: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = watched(model, optimizer, tmp_path, every=1)
    taken = []
    for i, batch in enumerate(batches(18)):
        loss = objective(model, batch)
        loss.backward()
        if i % 6 == 5:
            optimizer.step()
            taken.append(loss.item())
        optimizer.zero_grad(set_to_none=to_none)
    handle.close()
    assert losses(handle) == ([0, 1, 2], taken) and not handle.findings
    assert handle._step.cleared == 15


def test_torch_func_before_the_forward_pass_that_counts(tmp_path: Path) -> None:
    model = TinyModel().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = watched(model, optimizer, tmp_path, every=1)

    def of(weights: dict[str, Any], batch: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, weights, (batch[:, :-1],))
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    for batch in batches(2):
        torch.func.grad(of)({n: p.detach() for n, p in model.named_parameters()}, batch)
        objective(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.close()
    read = equipoise.open_run(handle.path).series("attention.entropy")
    assert len(read) == 2 and all(list(s) == [0, 1] for s, _ in read.values())
    assert not handle.findings


def replaced(model: nn.Module) -> Callable[[int], torch.optim.Optimizer]:
    """A new optimiser every two steps, as a schedule of phases makes them."""
    made: dict[int, torch.optim.Optimizer] = {}

    def of_step(step: int) -> torch.optim.Optimizer:
        phase = step // 2
        if phase not in made:
            made.clear()
            made[phase] = torch.optim.AdamW(model.parameters(), lr=1e-3 * (phase + 1))
        return made[phase]

    return of_step


def test_an_optimiser_made_anew_is_followed(tmp_path: Path) -> None:
    model = TinyModel()
    of_step = replaced(model)
    handle = watched(model, of_step(0), tmp_path, every=1)
    for step, batch in enumerate(batches(6)):
        optimizer = of_step(step)
        objective(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.close()
    assert losses(handle)[0] == [*range(6)]
    run = equipoise.open_run(handle.path)
    assert run.series("learning_rate")[""][1].tolist() == pytest.approx(
        [1e-3, 1e-3, 2e-3, 2e-3, 3e-3, 3e-3]
    )
    assert list(run.series("update.norm")["head"][0]) == [*range(6)]
    assert [f.code for f in handle.findings] == ["watch.optimizer"]


def test_two_optimisers_of_disjoint_parameters_make_one_step(tmp_path: Path) -> None:
    model = TinyModel()
    first = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    taken = {*first.param_groups[0]["params"]}
    rest = [weight for weight in model.parameters() if weight not in taken]
    second = torch.optim.SGD(rest, lr=0.1)
    handle = watched(model, first, tmp_path, every=1)
    for batch in batches(4):
        objective(model, batch).backward()
        second.step()
        first.step()
        model.zero_grad()
    handle.close()
    assert losses(handle)[0] == [*range(4)] and not handle.findings


def test_another_models_optimiser_is_not_followed(tmp_path: Path) -> None:
    model, other = TinyModel(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)
    handle = watched(model, optimizer, tmp_path, every=1)
    for batch in batches(2):
        for _ in range(3):
            other(torch.ones(1, 2)).sum().backward()
            theirs.step()
        objective(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.close()
    assert losses(handle)[0] == [0, 1] and not handle.findings


def test_unseen_steps_hold_one_loss(tmp_path: Path) -> None:
    """Gradients accumulate and no step is seen: one tensor is held, not many."""
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = watched(model, optimizer, tmp_path)
    for batch in batches(20):
        objective(model, batch).backward()
    held = handle._step.losses
    assert isinstance(held.own, Tensor) and held.own.grad_fn is None
    handle.close()


class Lookahead(torch.optim.Optimizer):
    """An optimiser around another of the same parameters, as timm's and others'."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


@pytest.mark.parametrize("counted", ["inner", "outer"])
def test_a_wrapper_and_the_optimiser_inside_it_take_one_step(
    counted: str, tmp_path: Path
) -> None:
    model = TinyModel()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = Lookahead(inner)
    given = inner if counted == "inner" else outer
    handle = watched(model, given, tmp_path, every=2)
    for batch in batches(5):
        objective(model, batch).backward()
        outer.step()
        outer.zero_grad()
    handle.close()
    assert losses(handle)[0] == [*range(5)] and not handle.findings
    run = equipoise.open_run(handle.path)
    assert list(run.series("update.norm")["head"][0]) == [0, 2, 4]
    assert [*run.steps] == [*range(5)]


@pytest.mark.parametrize("anew", [True, False])
def test_parameters_that_are_assigned_are_followed(anew: bool, tmp_path: Path) -> None:
    """``assign=True`` gives the model other parameters than the optimiser has."""
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = watched(model, optimizer, tmp_path, every=1)
    for i, batch in enumerate(batches(6)):
        if i == 3:
            weights = {k: v.clone() for k, v in model.state_dict().items()}
            model.load_state_dict(weights, assign=True)
            if anew:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        objective(model, batch).backward()
        optimizer.step()
        model.zero_grad()
    handle.close()
    run = equipoise.open_run(handle.path)
    assert losses(handle)[0] == [*range(6)]
    assert list(run.series("gradient.norm")["head"][0]) == [*range(6)]
    moved = list(run.series("update.norm")["head"][0])
    found = {finding.code for finding in handle.findings}
    if anew:
        assert moved == [*range(6)] and found == {"watch.optimizer"}
    else:  # the optimiser moves the parameters of before
        assert moved == [0, 1, 2] and "watch.unread.no_updates" in found
        assert "check.foreign_parameters" in found


def test_a_step_that_raises_is_no_step_that_was_not_seen(tmp_path: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, capturable=True)
    handle = watched(model, optimizer, tmp_path)
    objective(model, batches(1)[0]).backward()
    with pytest.raises(Exception, match="capturable"):  # on a CPU, after its state
        optimizer.step()
    handle.close()
    assert optimizer.state and not handle.findings


class Fails(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        raise ValueError("no step")


@pytest.mark.parametrize("closure", [False, True])
def test_an_optimiser_that_takes_over_after_one_that_raised_is_followed(
    closure: bool, tmp_path: Path
) -> None:
    model = TinyModel()
    handle = watched(model, Fails(model.parameters(), lr=0.1), tmp_path, every=1)
    seen = []

    def evaluate(batch: Tensor) -> Tensor:
        model.zero_grad()
        loss = objective(model, batch)
        loss.backward()
        seen.append(loss.item())
        return loss

    evaluate(batches(1)[0])
    with pytest.raises(ValueError, match="no step"):
        handle.optimizer.step()  # type: ignore[union-attr]
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    for batch in batches(3):
        if not closure:
            evaluate(batch)
        optimizer.step((lambda batch=batch: evaluate(batch)) if closure else None)
    handle.close()
    assert losses(handle) == ([0, 1, 2], seen)
    updates = equipoise.open_run(handle.path).series("update.norm")["blocks.0"]
    assert list(updates[0]) == [0, 1, 2]
    (found,) = handle.findings
    assert found.code == "watch.optimizer"


def test_an_optimiser_that_steps_inside_anothers_closure_takes_no_step_of_its_own(
    tmp_path: Path,
) -> None:
    model = TinyModel()
    outer = torch.optim.SGD(model.parameters(), lr=0.1)
    inner = torch.optim.SGD(model.head.parameters(), lr=0.1)
    handle = watched(model, outer, tmp_path, every=1)

    def closure() -> Tensor:
        outer.zero_grad()
        loss = objective(model, batches(1)[0])
        loss.backward()
        inner.step()
        return loss

    for _ in range(3):
        outer.step(closure)
    handle.close()
    assert losses(handle)[0] == [0, 1, 2] and handle.optimizer is outer


Roots = Callable[[Tensor, Tensor], tuple[Any, Any]]
SEVERAL: dict[str, tuple[Roots, float]] = {
    "several": (lambda a, b: ([a, b], None), 1.0),
    "iterated": (lambda a, b: (iter([a, b]), None), 1.0),
    "weighted": (lambda a, b: ([a, b], [None, torch.tensor(0.25)]), 0.25),
    "scaled": (lambda a, b: (torch.amp.GradScaler("cpu").scale([a, b]), None), 1.0),
    "one": (lambda a, b: (a + b, torch.tensor(1.0)), 1.0),
}


@pytest.mark.parametrize("way", SEVERAL)
def test_the_loss_of_several_roots_is_what_is_differentiated(
    way: str, tmp_path: Path
) -> None:
    roots, weight = SEVERAL[way]
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    handle = watched(model, optimizer, tmp_path, every=1)
    expected, first, second = [], *batches(2)
    for _ in range(3):
        a, b = objective(model, first), 3 * objective(model, second)
        expected.append(a.item() + weight * b.item())
        tensors, grads = roots(a, b)
        torch.autograd.backward(tensors, grads)
        optimizer.step()
        optimizer.zero_grad()
    handle.close()
    steps, values = losses(handle)
    assert steps == [0, 1, 2] and not handle.findings
    assert values == pytest.approx(expected, rel=1e-6)  # float32 sums


def test_of_several_roots_the_one_that_is_not_finite_is_named(tmp_path: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = watched(model, optimizer, tmp_path)
    bad = model.head(torch.full((2, WIDTH), torch.inf)).mean()
    torch.autograd.backward([objective(model, batches(1)[0]), bad])
    optimizer.step()
    handle.close()
    (found,) = [f for f in handle.findings if f.code.startswith("nonfinite")]
    assert found.code == "nonfinite.forward" and found.site == "head"


def test_gradients_of_a_backward_pass_from_no_scalar_are_read(tmp_path: Path) -> None:
    """As with cached gradients: the loss ends at representations, they go on."""
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = watched(model, optimizer, tmp_path, every=1)
    seen, norms = [], []
    for batch in batches(3):
        with torch.no_grad():
            leaf = model(batch[:, :-1])
        loss = leaf.requires_grad_().square().mean()
        loss.backward()
        seen.append(loss.item())
        model(batch[:, :-1]).backward(leaf.grad)
        grads = [p.grad for p in model.head.parameters()]
        norms.append(float(nn.utils.get_total_norm(grads)))
        optimizer.step()
        optimizer.zero_grad()
    handle.close()
    run = equipoise.open_run(handle.path)
    assert losses(handle) == ([0, 1, 2], seen)
    steps, read = run.series("gradient.norm")["head"]
    assert list(steps) == [0, 1, 2]
    assert read.tolist() == pytest.approx(norms, rel=1e-5)  # float32 sums
    (found,) = handle.findings
    assert found.severity == "info"
    assert found.code == "watch.unread.loss_not_scalar"


def test_gradients_that_the_loop_replaces_are_read_as_the_optimiser_gets_them(
    tmp_path: Path,
) -> None:
    """As PCGrad does: a backward pass for each task, then gradients of its own."""
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = watched(model, optimizer, tmp_path, every=1)
    norms = []
    for batch in batches(3):
        tasks = []
        for _ in range(2):
            optimizer.zero_grad()
            objective(model, batch).backward()
            tasks.append([p.grad for p in model.parameters()])
        for p, *grads in zip(model.parameters(), *tasks, strict=True):
            p.grad = sum(g for g in grads if g is not None)  # type: ignore[assignment]
        total = nn.utils.clip_grad_norm_(model.head.parameters(), 0.01)
        norms.append(float(total))
        optimizer.step()
    handle.close()
    steps, read = equipoise.open_run(handle.path).series("gradient.norm")["head"]
    assert list(steps) == [0, 1, 2]
    assert read.tolist() == pytest.approx(norms, rel=1e-5)  # float32 sums
    (found,) = handle.findings
    assert found.severity == "info"
    assert found.code == "watch.unread.gradients_replaced"


def test_a_frozen_model_has_no_loss_of_another(tmp_path: Path) -> None:
    """A teacher is watched too: the student's loss is not its own."""
    student, teacher = TinyModel(), TinyModel(depth=1).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    with watched(teacher, None, tmp_path, every=1) as handle:
        for batch in batches(3):
            with torch.no_grad():
                target = teacher(batch[:, :-1]).softmax(-1)
            F.cross_entropy(student(batch[:, :-1]), target).backward()
            optimizer.step()
            handle.step()
    run = equipoise.open_run(handle.path)
    assert "loss" not in run.quantities and len(run.steps) == 3


def test_an_optimiser_of_other_parameters_counts_once_the_first_ones_are_frozen(
    tmp_path: Path,
) -> None:
    """As where an adapter or a new head is trained from now on: no step is lost."""
    model = TinyModel()
    optimizer: Any = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    handle = watched(model, optimizer, tmp_path, every=1)
    seen = []
    for number, batch in enumerate(batches(4)):
        if number == 2:
            model.blocks.requires_grad_(False)
            optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
        loss = objective(model, batch)
        loss.backward()
        seen.append(loss.item())
        optimizer.step()
        model.zero_grad()
    handle.close()
    assert losses(handle) == ([0, 1, 2, 3], seen)
    forgotten, found = handle.findings  # the embedding is in no optimiser
    assert forgotten.code == "check.not_optimised"
    assert found.code == "watch.optimizer" and found.step == 2


def test_the_gradient_of_a_pruned_map_is_read(tmp_path: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = watched(model, optimizer, tmp_path, every=1, strict=True)
    site: Any = model.blocks[0].get_submodule("attention")
    prune.l1_unstructured(site.q_proj, "weight", 0.3)
    objective(model, batches(1)[0]).backward()
    grads = [site.q_proj.weight_orig.grad, site.k_proj.weight.grad]
    expected = nn.utils.get_total_norm(grads).item()
    optimizer.step()
    handle.close()
    found = equipoise.open_run(handle.path).series("gradient.qk")["blocks.0.attention"]
    assert found[1].tolist() == pytest.approx([expected], rel=1e-5)


@pytest.mark.parametrize("way", ["whole", "by layer", "twice"])
def test_the_norm_that_clips_is_of_all_that_is_clipped_of_this_model(
    way: str, tmp_path: Path
) -> None:
    """A critic's norm is not ours, and who clips layer by layer has one gradient."""
    model, critic = TinyModel(), TinyModel(depth=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = watched(model, optimizer, tmp_path, every=2)
    norms = []
    for batch in batches(4):
        for one in (critic, model, critic):
            objective(one, batch).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(nn.utils.get_total_norm(grads).item())
        nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
        parts = [model.parameters()] * (2 if way == "twice" else 1)
        if way == "by layer":
            parts = [child.parameters() for child in model.children()]
        for i, part in enumerate(parts, 1):
            norm = nn.utils.clip_grad_norm_(part, 0.1 if i == len(parts) else 1e9)
            norm.zero_()  # the loop's own, to do with as it likes
        nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    handle.close()
    steps, values = equipoise.open_run(handle.path).series("gradient.norm.total")[""]
    assert list(steps) == [0, 1, 2, 3]
    # float32 sums in another order.
    assert values.tolist() == pytest.approx(norms, rel=1e-5)


def test_what_was_clipped_in_an_earlier_step_is_not_part_of_the_norm(
    tmp_path: Path,
) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = watched(model, optimizer, tmp_path)
    for part in (model.blocks, model.head):
        objective(model, batches(1)[0]).backward()
        norm = float(nn.utils.clip_grad_norm_(part.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
    handle.close()
    _, values = equipoise.open_run(handle.path).series("gradient.norm.total")[""]
    assert values[1] == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("unseen", [0, 1])
def test_a_step_that_no_hook_saw_is_reported_at_the_end(
    before: int, unseen: int, tmp_path: Path
) -> None:
    """Not one that was taken before watching began: its state is no sign."""
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]
    objective(model, batches(1)[0]).backward()
    for _ in range(before):
        step(optimizer)
    handle = watched(model, optimizer, tmp_path)
    objective(model, batches(1)[0]).backward()
    for _ in range(unseen):
        step(optimizer)
    handle.close()
    found = [(finding.code, finding.severity) for finding in handle.findings]
    assert found == [("watch.silent.no_step", "error")] * unseen


def test_a_second_optimiser_of_the_model_is_read_too(tmp_path: Path) -> None:
    """One for matrices, one for the rest: the updates of both are read."""
    model = TinyModel()
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    theirs = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in theirs]
    first = torch.optim.AdamW(rest, lr=1e-3)
    second = torch.optim.SGD(matrices, lr=0.1, momentum=0.9)
    handle = watched(model, second, tmp_path, every=1)
    for batch in batches(3):
        objective(model, batch).backward()
        first.step()
        second.step()
        model.zero_grad()
    handle.close()
    updates = equipoise.open_run(handle.path).series("update.norm")
    assert {"embedding", "head", "blocks.0", "blocks.1"} <= {*updates}
    assert all(list(steps) == [0, 1, 2] for steps, _ in updates.values())
    assert not handle.findings


def test_an_optimiser_that_steps_after_the_counted_one_is_named(tmp_path: Path) -> None:
    model = TinyModel()
    first = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    second = torch.optim.SGD(model.head.parameters(), lr=0.1)
    handle = watched(model, first, tmp_path, every=2)
    for batch in batches(2):
        objective(model, batch).backward()
        first.step()
        second.step()
        model.zero_grad()
    handle.close()
    (found,) = handle.findings
    assert found.severity == "info"
    assert found.code == "watch.unread.late_optimizer"


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_gradients_of_autograd_grad_are_read(
    given: bool, clips: bool, tmp_path: Path
) -> None:
    """No backward pass shows the loss: it is given, or named as not recorded."""
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = watched(model, optimizer, tmp_path, every=1)
    weights, norms = [*model.parameters()], []
    for batch in batches(3):
        loss = objective(model, batch)
        gradients = torch.autograd.grad(loss, weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        norms.append(
            float(nn.utils.get_total_norm(p.grad for p in model.head.parameters()))
        )
        if clips:
            nn.utils.clip_grad_norm_(weights, 0.01)
        optimizer.step()
        if given:
            handle.step(loss=loss)
    handle.close()
    run = equipoise.open_run(handle.path)
    steps, read = run.series("gradient.norm")["head"]
    assert list(steps) == [0, 1, 2]
    assert read.tolist() == pytest.approx(norms, rel=1e-5)  # float32 sums
    assert list(run.series("attention.entropy")["blocks.0.attention"][0]) == [0, 1, 2]
    if given:
        assert losses(handle)[0] == [0, 1, 2] and not handle.findings
    else:
        (found,) = handle.findings
        assert (found.severity, found.code) == ("warn", "watch.silent.no_loss")


def test_an_optimiser_that_steps_inside_the_backward_pass(tmp_path: Path) -> None:
    """It leaves no gradient behind: the loss is recorded, what is unread is named."""
    model = TinyModel()
    each = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(parameter: Tensor) -> None:
        each[parameter].step()
        each[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    last = each[model.embedding.weight]  # whose gradient arrives last
    handle = watched(model, last, tmp_path, every=1)
    seen = []
    for batch in batches(3):
        loss = objective(model, batch)
        loss.backward()
        seen.append(loss.item())
    handle.close()
    assert losses(handle) == ([0, 1, 2], seen)
    (found,) = handle.findings
    assert found.severity == "info"
    assert found.code == "watch.unread.no_gradients"


def test_optimisers_that_take_turns_with_batches_are_named(tmp_path: Path) -> None:
    model = TinyModel()
    first = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    rest = [p for name, p in model.named_parameters() if "blocks" not in name]
    second = torch.optim.SGD(rest, lr=0.1)
    handle = watched(model, first, tmp_path, every=2)
    for number, batch in enumerate(batches(6)):
        objective(model, batch).backward()
        (first, second)[number % 2].step()
        model.zero_grad()
    handle.close()
    (found,) = handle.findings
    assert found.code == "watch.unread.other_batches"
    assert losses(handle)[0] == [0, 1, 2]


def test_a_loss_changed_in_place_after_its_backward_pass(tmp_path: Path) -> None:
    """What is recorded is the loss that was differentiated, not what became of it."""
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = watched(model, optimizer, tmp_path, every=1)
    differentiated = []
    for batch in batches(3):
        loss = objective(model, batch)
        differentiated.append(loss.item())
        loss.backward()
        loss.data.mul_(100)
        optimizer.step()
        optimizer.zero_grad()
    handle.close()
    assert losses(handle) == ([0, 1, 2], differentiated)


@pytest.mark.parametrize("preset", ["default", "deep"])
def test_a_float64_model_loses_no_probe(preset: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = PostNorm().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = watched(model, optimizer, tmp_path, every=1, preset=preset, strict=True)
    for _ in range(2):
        x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.close()
    run = equipoise.open_run(handle.path)
    read = {"output.logit_norm", "backward.norm_factor", "update.norm", "residual.B"}
    assert read <= {*run.quantities}
    codes = [f.code for f in handle.findings]
    assert codes == ["watch.unread.values_inside"] * (preset == "deep")


class PostNorm(nn.Module):
    """A post-LN encoder, so that the backward factors exist."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 32, dropout=0.0, batch_first=True, norm_first=False
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(x))
        return out
