"""The first non-finite tensor: site, direction, Inf or NaN, named off-sample too."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import equipoise
from equipoise.cli import replay
from equipoise.errors import InputError, RunFileError
from equipoise.watching.step.batch import bundle_path, load_step
from equipoise.watching.step.nonfinite import (
    NEAR,
    NonfiniteMonitor,
    Repeats,
    first_bad_module,
)
from tests.watching.models import TinyModel, batches, hooks_on, objective

BAD = {"NaN": float("nan"), "Inf": float("inf")}


def watched(
    tmp_path: Path, break_at: int, broken: Any, *, clip: bool = True, **options: Any
) -> list[equipoise.Finding]:
    """Return what is found when ``broken(model)`` is in force at one step."""
    torch.manual_seed(0)
    model = TinyModel(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tmp_path / "a.eqp"
    with equipoise.watch(model, optimizer, run=run, every=5, strict=True) as handle:
        for step, batch in enumerate(batches(8)):
            undo = broken(model) if step == break_at else None
            objective(model, batch).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if undo is not None:
                undo.remove()
    assert equipoise.open_run(run).findings == list(handle.findings)
    return list(handle.findings)


def passes(findings: Sequence[equipoise.Finding]) -> list[equipoise.Finding]:
    """Return the findings of a pass that is not finite; checks name what it leaves."""
    return [found for found in findings if found.belongs_to("nonfinite")]


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize(
    "site", ["blocks.0.attention.o_proj", "blocks.1.up", "blocks.1.norm_2", "head"]
)
def test_an_activation_is_named(site: str, kind: str, tmp_path: Path) -> None:
    def broken(model: nn.Module) -> Any:
        def spoil(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            bad = torch.zeros_like(out)
            bad[0] = BAD[kind]
            return out + bad

        return model.get_submodule(site).register_forward_hook(spoil)

    (found,) = passes(watched(tmp_path, 3, broken))
    assert (found.step, found.code, found.severity) == (3, "nonfinite.forward", "error")
    assert found.params["direction"] == "forward" and found.params["rank"] == 0
    near = {
        "blocks.0.attention.o_proj": ("blocks.0.norm_2", "o_proj"),
        "blocks.1.up": ("blocks.1.up",),
        "blocks.1.norm_2": ("blocks.1.up", "norm_2"),
        "head": ("head",),
    }
    # The first tensor the graph kept: at the site itself, or just behind it.
    seen = f"{found.site} {found.params.get('after')}"
    assert any(name in seen for name in near[site])
    assert found.params["kind"] in (kind, "NaN")


@pytest.mark.parametrize("kind", BAD)
def test_a_weight_that_is_broken_already_is_named(kind: str, tmp_path: Path) -> None:
    def broken(model: Any) -> None:
        model.blocks[1].up.weight.data[0, 0] = BAD[kind]

    (found,) = passes(watched(tmp_path, 2, broken))
    assert (found.step, found.code) == (2, "nonfinite.update")
    assert found.site == "blocks.1.up" and found.params["kind"] == kind


def test_a_gradient_is_named_before_it_clips(tmp_path: Path) -> None:
    class Vertical(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *g: Any) -> Any:
            return g[0] * float("inf")

    def broken(model: nn.Module) -> Any:
        site = model.get_submodule("blocks.0")
        return site.register_forward_hook(lambda m, a, out: Vertical.apply(out))

    found = watched(tmp_path, 3, broken)[0]
    assert (found.step, found.code) == (3, "nonfinite.backward")
    assert found.site.startswith("blocks.0"), "later blocks have good gradients"


def test_without_clipping_the_next_step_tells(tmp_path: Path) -> None:
    def broken(model: nn.Module) -> Any:
        weight = model.get_parameter("head.weight")
        return weight.register_hook(lambda g: g * float("nan"))

    (found,) = passes(watched(tmp_path, 2, broken, clip=False))
    assert (found.step, found.code, found.site) == (3, "nonfinite.update", "head")


def test_checkpointed_blocks_are_not_recomputed_for_reading(tmp_path: Path) -> None:
    calls: list[int] = []

    def broken(model: nn.Module) -> Any:
        def spoil(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            calls.append(1)
            return out * float("nan")

        return model.get_submodule("blocks.0.down").register_forward_hook(spoil)

    (found,) = passes(watched(tmp_path, 3, broken, reentrant=False))
    assert found.code == "nonfinite.forward"
    assert len(calls) == 1, "the checkpoint's own recomputation stops before it"


class Doubled(torch.autograd.Function):
    """Somebody's own function: what it saved goes by another name than torch's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


def test_a_function_of_the_user_is_traced(tmp_path: Path) -> None:
    def broken(model: nn.Module) -> Any:
        def spoil(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            doubled: Tensor = Doubled.apply(out + float("nan"))
            return doubled

        return model.get_submodule("blocks.0.norm_2").register_forward_hook(spoil)

    (found,) = passes(watched(tmp_path, 3, broken))
    assert (found.code, found.step) == ("nonfinite.forward", 3)
    assert found.params["operation"] == "Doubled"
    assert "blocks.0.norm_2" in (found.site, found.params["after"])


def test_what_breaks_again_at_one_place_is_counted() -> None:
    """Far apart it is another trouble; elsewhere too."""
    repeats = Repeats()

    def at(step: int, site: str = "head") -> list[tuple[str, object]]:
        found = equipoise.Finding.error(
            step, "nonfinite.forward", site=site, kind="NaN", rank=0
        )
        return [(f.code, f.params.get("times")) for f in repeats.counted(found)]

    first = [("nonfinite.forward", None)]
    told = [at(2), *(at(step) for step in range(4, 22, 2))]
    assert told == [first, *[[]] * 8, [("nonfinite.repeated", 10)]]
    assert at(22, "embed") == first and at(119) == []
    assert at(119 + NEAR) == first


def test_a_nonfinite_loss_after_recovery_is_counted(tmp_path: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with equipoise.watch(model, optimizer, run=tmp_path / "a.eqp") as handle:
        for step, batch in enumerate(batches(33)):
            loss = objective(model, batch)
            (loss * float("nan") if step % 3 == 2 else loss).backward()
            optimizer.zero_grad()  # a loop that skips what is bad
            optimizer.step()
    found = passes(handle.findings)
    assert [one.step for one in found] == [2, 29]
    assert "10 times since step 2" in found[-1].message


def test_on_an_accelerator_a_loss_is_checked_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There no value is on the host before it is written; a CPU stands in for it."""
    host_value = "equipoise.watching.step.nonfinite.host_value"
    monkeypatch.setattr(host_value, lambda scalar: None)

    def broken(model: nn.Module) -> Any:
        with torch.no_grad():
            model.get_parameter("blocks.1.up.weight")[0, 0] = float("nan")

    (found,) = passes(watched(tmp_path, 3, broken, clip=False))
    assert (found.step, found.code) == (3, "nonfinite.update")
    assert found.site.startswith(("blocks", "embedding"))  # all are, by now


def test_a_late_loss_is_reported_once_and_again_after_recovery() -> None:
    monitor = NonfiniteMonitor(TinyModel())
    nan = float("nan")
    losses = [1.0, nan, nan, 2.0, nan, 3.0]
    found = [
        finding.step
        for step, loss in enumerate(losses)
        for finding in monitor.check_late([(step, "loss", loss), (step, "other", nan)])
    ]
    assert found == [1, 4]
    assert monitor.check_late([(9, "loss", nan)])[0].code == "nonfinite.unknown"


@pytest.mark.parametrize("site", ["blocks.0.attention", "blocks.1.norm_2", "head"])
def test_a_stored_batch_names_the_module_and_can_be_replayed(
    site: str, tmp_path: Path
) -> None:
    def broken(model: nn.Module) -> Any:
        def spoil(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            return out * float("nan")

        return model.get_submodule(site).register_forward_hook(spoil)

    torch.manual_seed(0)
    model = TinyModel(dropout=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run = tmp_path / "a.eqp"
    with equipoise.watch(
        model, optimizer, run=run, every=5, strict=True, hold_batch=True
    ) as handle:
        for step, batch in enumerate(batches(4)):
            undo = broken(model) if step == 3 else None
            objective(model, batch).backward()
            optimizer.step()
    (found,) = handle.findings
    assert (found.step, found.site) == (3, site)
    assert hooks_on(model) == 1, "only the test's own"
    assert undo is not None
    fresh = TinyModel(dropout=0.1)
    kept = load_step(bundle_path(run, 3), fresh)
    broken(fresh)
    origin = first_bad_module(fresh, kept)
    assert origin is not None and origin.site == site
    undo.remove()
    clean = TinyModel(dropout=0.1)
    assert first_bad_module(clean, load_step(bundle_path(run, 3), clean)) is None
    with pytest.raises(InputError, match="does not fit"):
        load_step(bundle_path(run, 3), TinyModel(depth=1))
    with pytest.raises(RunFileError, match="hold_batch=True"):
        load_step(bundle_path(run, 4), clean)


def broken_model() -> nn.Module:
    return TinyModel()


def test_replay_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tmp_path / "a.eqp"
    with equipoise.watch(model, optimizer, run=run, hold_batch=True):
        (objective(model, batches(1)[0]) * float("nan")).backward()
        optimizer.step()
    replay.command(run, f"{__name__}:broken_model")
    printed = capsys.readouterr().out
    assert "step 0" in printed and "every output is finite" in printed
    assert "attention.entropy" in printed
    with pytest.raises(RunFileError, match=r"step 5 was not saved.*\[0\]"):
        replay.command(run, f"{__name__}:broken_model", step=5)
    with pytest.raises(RunFileError, match="no step of it was saved"):
        replay.command(tmp_path / "b.eqp", "a:b")
    with pytest.raises(InputError, match="module:function"):
        replay.built("nowhere:nothing")
    with pytest.raises(InputError, match="not a model"):
        replay.built("pathlib:Path")


def test_a_rank_with_a_nan_alone_runs_no_collective_pass() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = TinyModel()
        fully_shard(model)
        asked: list[str] = []

        class Joined:
            def replay(self, model: nn.Module) -> None:
                asked.append("replayed")

        monitor = NonfiniteMonitor(model, stored=lambda: Joined())  # type: ignore[arg-type,return-value]
        root = objective(model, batches(1)[0]) * float("nan")
        monitor.check_loss(3, root.detach(), [root])
        (found,) = monitor.pop()
    finally:
        dist.destroy_process_group()
    assert not asked and found.code == "nonfinite.forward"
