"""Short loops, watched, and which checks found something in them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equipoise
from tests.watching.models import TinyModel, batches, declared, objective

Loop = Callable[["Watched"], Any]
STEPS = 8


class Watched:
    """Attaches the instrument as a loop would, every step of it sampled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.handles: list[equipoise.Watch] = []

    def __call__(self, model: nn.Module, optimizer: Any, **options: Any) -> Any:
        run = self._folder / f"{len(self.handles)}.eqp"
        given = {"every": 1, "preset": "minimal", "quiet": True, "strict": True}
        with declared():
            handle = equipoise.watch(model, optimizer, run=run, **{**given, **options})
        self.handles.append(handle)
        return handle


def checked(loop: Loop, folder: Path) -> dict[str, int]:
    """Return code → first step of what the checks found that still holds."""
    torch.manual_seed(0)
    watch = Watched(folder)
    loop(watch)
    found: dict[str, int] = {}
    for handle in watch.handles:
        handle.close()
        for finding in equipoise.open_run(handle.path).findings:
            if not finding.code.startswith(("check.", "rule.failed", "probe.failed")):
                continue
            if finding.params.get("resolved"):
                found.pop(finding.code, None)
            else:
                found.setdefault(finding.code, finding.step)
    return found


def cases(*loops: Loop) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("loop", loops, ids=lambda loop: loop.__name__)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return objective(model, batch)


def trained(
    watch: Watched,
    model: nn.Module | None = None,
    optimizer: Any = None,
    *,
    before: Callable[[int], Any] = lambda step: None,
    after: Callable[[int], Any] = lambda step: None,
    steps: int = STEPS,
    clear: bool = True,
) -> None:
    """Run the plainest loop, with something done before and after each update."""
    model = TinyModel() if model is None else model
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch(model, optimizer)
    for step, batch in enumerate(batches(steps)):
        if clear:
            optimizer.zero_grad()
        loss(model, batch).backward()
        before(step)
        optimizer.step()
        after(step)
