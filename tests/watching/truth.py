"""What a group of ranks is held against: one process, and dense linear algebra."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import equipoise
from tests.watching.dying import free_port
from tests.watching.group import STEPS, halves
from tests.watching.patients import batches, objective

Norms = dict[tuple[int, str], dict[str, float]]
"""(step, site) → the largest singular value of each projection."""


def said_by(module: str, folder: Path, *, ranks: int) -> list[dict[str, Any]]:
    """Run a module once per rank, and return what each rank wrote."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), port, str(folder)],
            cwd=Path(__file__).parents[2],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]
    files = (folder / f"rank-{rank}.json" for rank in range(ranks))
    return [json.loads(file.read_text()) for file in files]


class Whole(NamedTuple):
    """A training in one process that sees all and holds all."""

    run: equipoise.Run
    norms: Norms


def everything(batch: Tensor) -> Tensor:
    return torch.cat(halves(batch))


def trained_whole(
    model: nn.Module,
    path: Path,
    *,
    clip: bool = False,
    data: Callable[[Tensor], Tensor] = everything,
    **options: Any,
) -> Whole:
    # SGD: Adam's signs would carry a rounding of 1e-8 to 1e-4 in two steps.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms: Norms = {}
    with equipoise.watch(model, optimizer, run=path, every=2, **options):
        for step, batch in enumerate(batches(STEPS)):
            objective(model, data(batch)).backward()
            norms |= {(step, site): found for site, found in _norms(model)}
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return Whole(equipoise.open_run(path), norms)


def _norms(model: nn.Module) -> list[tuple[str, dict[str, float]]]:
    return [
        (name, {letter: _largest(module, letter) for letter in "qkvo"})
        for name, module in model.named_modules()
        if hasattr(module, "q_proj")
    ]


def _largest(module: Any, letter: str) -> float:
    weight = getattr(module, f"{letter}_proj").weight.detach()
    return float(torch.linalg.svdvals(weight.double())[0])


def assert_norms(run: equipoise.Run, norms: Norms, rel: float = 1e-5) -> None:
    """The norms read are the largest singular values, and G is their product."""
    read = {letter: run.series(f"projection.norm.{letter}") for letter in "qkvo"}
    gains = run.series("projection.G")
    assert gains.keys() == {site for _, site in norms}
    for site, (steps, values) in gains.items():
        for i, (step, G) in enumerate(zip(steps, values.flatten(), strict=True)):
            truth = norms[int(step), site]
            for letter, norm in truth.items():
                found = read[letter][site][1].flatten()[i]
                assert float(found) == pytest.approx(norm, rel=rel)
            assert float(G) == pytest.approx(math.prod(truth.values()), rel=4 * rel)
