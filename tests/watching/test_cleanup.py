"""No trace is left behind: not by an exception, not by closing, not by copying."""

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad
from torch.utils.hooks import RemovableHandle

import equipoise
from equipoise.anatomy.sites import Anatomy
from equipoise.errors import InputError
from equipoise.probes.protocols import Emit, Guarded
from equipoise.watching.ranks.group import SingleRank
from equipoise.watching.ranks.merge import RankSample
from tests.watching.models import TinyModel, batches, hooks_on, objective

PATCHED = (torch.autograd, "backward"), (clip_grad, "_clip_grads_with_norm_")
PATCHED += (torch.amp.GradScaler, "scale"), (torch.amp.GradScaler, "update")


@pytest.fixture(autouse=True)
def everything_is_as_it_was() -> Iterator[None]:
    before = [getattr(owner, name) for owner, name in PATCHED]
    yield
    gc.collect()
    assert [getattr(owner, name) for owner, name in PATCHED] == before
    assert torch._C._len_torch_function_stack() == 0


def pair(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


class RaisesInForward(TinyModel):
    stumbles = True

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.embedding(tokens))
        if self.stumbles:
            raise RuntimeError("raised in forward")
        out: Tensor = self.head(x)
        return out


def test_exception_in_forward(tmp_path: Path) -> None:
    model, optimizer = pair(RaisesInForward())
    with pytest.raises(RuntimeError, match="raised in forward"):
        with equipoise.watch(model, optimizer, run=tmp_path / "a.eqp"):
            model(batches(1)[0])
    assert hooks_on(model) == 0


def test_a_loop_that_catches_an_exception_continues(tmp_path: Path) -> None:
    model, optimizer = pair(RaisesInForward())
    with equipoise.watch(model, optimizer, run=tmp_path / "a.eqp", every=1) as handle:
        with pytest.raises(RuntimeError, match="raised in forward"):
            model(batches(1)[0])
        assert torch._C._len_torch_function_stack() == 0
        model.stumbles = False
        for batch in batches(3):
            objective(model, batch).backward()
            optimizer.step()
    assert handle.current_step == 3
    assert (
        len(equipoise.open_run(handle.path).series("gradient.norm.total")[""][0]) == 3
    )


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *g: Any) -> Any:
        raise RuntimeError("no way back")


def test_exception_in_backward(tmp_path: Path) -> None:
    model, optimizer = pair(TinyModel())
    with pytest.raises(RuntimeError, match="no way back"):
        with equipoise.watch(model, optimizer, run=tmp_path / "a.eqp"):
            RaisesInBackward.apply(objective(model, batches(1)[0])).backward()
    assert hooks_on(model) == 0


class FailingProbe:
    """A probe that fails where it is asked to."""

    name = "broken"

    def __init__(self, where: str) -> None:
        self.where = where

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        hook = guarded(self._fail if self.where == "hook" else lambda *_: None)
        yield anatomy.model.get_submodule("head").register_forward_hook(hook)
        if self.where == "attach":
            self._fail()

    def on_attention(self, site: str, call: Any, emit: Emit) -> None:
        if self.where == "attention":
            self._fail()

    def on_gradients(
        self, anatomy: Anatomy, emit: Emit, *, scale: Tensor | None
    ) -> None:
        if self.where == "gradients":
            self._fail()

    def on_update(self, optimizer: torch.optim.Optimizer, emit: Emit) -> None:
        if self.where == "update":
            self._fail()

    def _fail(self, *args: Any) -> None:
        raise ZeroDivisionError("our mistake")


PLACES = ["hook", "attach", "attention", "gradients", "update"]


@pytest.mark.parametrize("where", PLACES)
def test_a_failing_probe_is_detached_and_reported_once(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = pair(TinyModel())
    probes = [FailingProbe(where)]
    run = tmp_path / "a.eqp"
    with equipoise.watch(model, optimizer, run=run, every=1, probes=probes) as handle:
        for batch in batches(3):
            optimizer.zero_grad()
            objective(model, batch).backward()
            optimizer.step()
    assert sum("our mistake" in (r.exc_text or "") for r in caplog.records) == 1
    (found,) = equipoise.open_run(handle.path).findings
    assert (found.code, found.severity) == ("probe.failed.broken", "warn")
    assert found.params["probe"] == "broken"
    assert "ZeroDivisionError" in str(found.params["error"])
    assert hooks_on(model) == 0


@pytest.mark.parametrize("where", PLACES)
def test_strict_raises(where: str, tmp_path: Path) -> None:
    model, optimizer = pair(TinyModel())
    with pytest.raises(ZeroDivisionError, match="our mistake"):
        with equipoise.watch(
            model,
            optimizer,
            run=tmp_path / "a.eqp",
            probes=[FailingProbe(where)],
            strict=True,
        ):
            objective(model, batches(1)[0]).backward()
            optimizer.step()
    assert hooks_on(model) == 0


def test_a_failing_store_does_not_stop_training(tmp_path: Path) -> None:
    model, optimizer = pair(TinyModel())
    handle = equipoise.watch(model, optimizer, run=tmp_path / "a.eqp", every=1)
    handle._recorder.writer._run.close()  # the disk is gone
    for batch in batches(3):
        objective(model, batch).backward()
        optimizer.step()
    handle.close()
    assert hooks_on(model) == 0
    assert any(finding.severity != "info" for finding in handle.findings)


def test_after_a_failed_exchange_the_rank_continues_alone(tmp_path: Path) -> None:
    """The exchange fails: this rank's readings are written from then on."""
    model, optimizer = pair(TinyModel())
    run = tmp_path / "a.eqp"

    class FailingExchange(SingleRank):
        def exchange(self, message: RankSample) -> Sequence[RankSample]:
            raise RuntimeError("connection closed by peer")

    with equipoise.watch(model, optimizer, run=run, every=3) as handle:
        for step, batch in enumerate(batches(6)):
            if step == 2:
                handle._recorder.ranks = FailingExchange()
            objective(model, batch).backward()
            optimizer.step()
    assert handle.closed and hooks_on(model) == 0
    assert list(equipoise.open_run(run).series("loss")[""][0]) == [*range(6)]


def test_closing_twice_and_watching_again(tmp_path: Path) -> None:
    model, optimizer = pair(TinyModel())
    first = equipoise.watch(model, optimizer, run=tmp_path / "a.eqp")
    first.close()
    first.close()
    with equipoise.watch(model, optimizer, run=tmp_path / "b.eqp") as second:
        assert second is not first
    assert hooks_on(model) == 0
    assert not optimizer._optimizer_step_post_hooks


def test_functions_taken_or_patched_while_watching_still_work(tmp_path: Path) -> None:
    """By a module imported meanwhile, or by another library on top of ours."""
    own = torch.autograd.backward
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = equipoise.watch(model, optimizer, run=tmp_path / "a.eqp")
    taken, calls = torch.autograd.backward, []

    def theirs(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        taken(*args, **kwargs)

    torch.autograd.backward = theirs
    handle.close()
    assert torch.autograd.backward is theirs
    taken(objective(model, batches(1)[0]))
    again = equipoise.watch(model, optimizer, run=tmp_path / "b.eqp")
    objective(model, batches(1)[0]).backward()
    optimizer.step()
    torch.autograd.backward = taken
    again.close()
    assert len(calls) == 1 and torch.autograd.backward is own
    assert len(equipoise.open_run(again.path).series("loss")[""][0]) == 1


def test_watching_twice_is_watching_once(tmp_path: Path) -> None:
    model, optimizer = pair(TinyModel())
    first = equipoise.watch(model, optimizer, run=tmp_path / "a.eqp")
    assert equipoise.watch(model, optimizer, run=tmp_path / "a.eqp") is first
    assert equipoise.watch(model, optimizer) is first
    other = equipoise.watch(model, optimizer, run=tmp_path / "b.eqp", every=2)
    assert first.closed and not other.closed
    other.close()


def test_watching_again_with_other_sinks_reaches_them(tmp_path: Path) -> None:
    model, optimizer = pair(TinyModel())
    first = equipoise.watch(model, optimizer, run=tmp_path / "a.eqp", sinks=["jsonl"])
    again = equipoise.watch(model, optimizer, run=tmp_path / "a.eqp", sinks=["jsonl"])
    assert again is first
    seen: list[int] = []
    with equipoise.watch(
        model,
        optimizer,
        run=tmp_path / "b.eqp",
        sinks=[lambda _, step: seen.append(step)],
    ):
        objective(model, batches(1)[0]).backward()
        optimizer.step()
    assert first.closed and seen == [0]
    handle = equipoise.watch(model, optimizer, run=tmp_path / "c.eqp")
    other = equipoise.watch(
        model, optimizer, run=tmp_path / "c.eqp", on_finding=lambda finding: None
    )
    assert handle.closed and not other.closed
    other.close()


def test_a_copy_of_a_watched_model_has_no_hooks(tmp_path: Path) -> None:
    """Weight averaging copies models, and people pickle whole ones."""
    model, optimizer = pair(TinyModel())
    with equipoise.watch(model, optimizer, run=tmp_path / "a.eqp") as handle:
        copied = copy.deepcopy(model)
        thawed = pickle.loads(pickle.dumps(model))
        for other in (copied, thawed):
            objective(other, batches(1)[0])
        assert not handle._step.passes, "the copies are not watched"
        objective(model, batches(1)[0])
        assert handle._step.passes


def test_a_dropped_handle_frees_its_model(tmp_path: Path) -> None:
    model, optimizer = pair(TinyModel())
    handle = equipoise.watch(model, optimizer, run=tmp_path / "a.eqp")
    gone = weakref.ref(model)
    del model, optimizer, handle
    gc.collect()
    assert gone() is None


def test_options_that_do_not_exist_leave_nothing(tmp_path: Path) -> None:
    model, optimizer = pair(TinyModel())
    with pytest.raises(InputError, match="evry.*nearest is every"):
        equipoise.watch(model, optimizer, run=tmp_path / "a.eqp", evry=3)
    assert hooks_on(model) == 0 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("preset", ["minimal", "default", "deep"])
def test_no_synchronisation_in_a_sampled_step(preset: str, tmp_path: Path) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += "_local_scalar_dense" in str(func)
            return func(*args, **(kwargs or {}))

    model, optimizer = pair(TinyModel(dropout=0.1))
    options = {"run": tmp_path / "a.eqp", "every": 1, "preset": preset}
    with equipoise.watch(model, optimizer, **options) as handle:
        for batch in batches(2):
            with Counting() as counting:
                logits = model(batch[:, :-1])
                F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert counting.count == 0
            optimizer.step()
            optimizer.zero_grad()
    assert not handle.findings
