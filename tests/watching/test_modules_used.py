"""What one sampled step runs through, and what the default preset loads."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

import equipoise
from tests.watching.models import TinyModel, batches, objective

MOST_MODULES = 60
"""Modules of ours that one sampled step may execute functions of."""
APART = (
    "equipoise.judging",
    "equipoise.watching.facts",
    "equipoise.watching.loop.loss",
)
"""Judging, which reads records only, and the readers of facts, one for each section."""


@contextmanager
def modules_executed(found: set[str]) -> Iterator[None]:
    """Collect the modules of every Python function called in the block."""

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            found.add(frame.f_globals.get("__name__", ""))

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def test_a_sampled_step_runs_through_few_modules(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters())
    found: set[str] = set()
    with equipoise.watch(model, optimizer, run=tmp_path / "a.eqp", every=1):
        for step, batch in enumerate(batches(3)):
            last = step == 2
            with modules_executed(found) if last else nullcontext():
                optimizer.zero_grad()
                objective(model, batch).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
    ours = {name for name in found if name.startswith("equipoise.")}
    ours -= {name for name in ours if name.startswith(APART)}
    assert "equipoise.watching.step.pipeline" in ours, "nothing was sampled"
    assert len(ours) <= MOST_MODULES, "\n".join(sorted(ours))


LOADED = """
import sys, equipoise.watching.start as start
from equipoise.watching.options import preset_probes
preset_probes("{preset}")
heavy = "equipoise.theory", "torch.distributed.tensor"
print(*(name for name in sys.modules if name.startswith(heavy)))
"""


def heavy_modules_of(preset: str) -> list[str]:
    """Return what the preset loads of theory, and of what only sharded models need."""
    code = LOADED.format(preset=preset)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_the_default_preset_loads_no_theory_and_no_sharded_tensors() -> None:
    assert heavy_modules_of("default") == []
    assert heavy_modules_of("deep"), "the deep preset reads the papers' quantities"
