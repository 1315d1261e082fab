"""What a group of ranks is held against: one process, and dense linear algebra."""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import equipoise
from tests.watching.models import batches, objective
from tests.watching.rank_exit import free_port
from tests.watching.two_ranks import STEPS, halves

Norms = dict[tuple[int, str], dict[str, float]]
"""(step, site) → the largest singular value of each projection."""


def run_ranks(module: str, folder: Path, *, ranks: int) -> list[dict[str, Any]]:
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
        _, errors = process.communicate(timeout=1200)
        assert process.returncode == 0, errors[-3000:]
    files = (folder / f"rank-{rank}.json" for rank in range(ranks))
    return [json.loads(file.read_text()) for file in files]


# Where a last bit decides: bf16's roundings, of a few hundred; whether a token chosen
# alone lies within the distance to itself; and the norms of one process, which four
# warm steps leave below the truth (``assert_norms`` has it).
LOOSE = {
    "precision.rms_error.bf16": (5e-2, 0.0),
    "selection.recall.cosine": (0.0, 1.0),
    **{f"projection.{name}": (1e-4, 0.0) for name in ("G", "norm.q", "norm.k")},
    **{f"projection.{name}": (1e-4, 0.0) for name in ("norm.v", "norm.o")},
    **{f"sensitivity.{name}": (1e-4, 0.0) for name in ("S", "S_residual")},
    "sensitivity.ln_G": (0.0, 1e-4),
}


def assert_readings(
    run: equipoise.Run, alone: equipoise.Run, *, of: Iterable[str]
) -> None:
    """Every reading is that of one process; how well a norm is known is the group's."""
    for quantity in {*of} - {"projection.norm.error"}:
        expected, found = alone.series(quantity), run.series(quantity)
        assert expected.keys() == found.keys()
        for site, (steps, values) in expected.items():
            assert list(found[site][0]) == list(steps)
            rtol, atol = LOOSE.get(quantity, (1e-5, 1e-7))
            torch.testing.assert_close(
                torch.tensor(found[site][1]),
                torch.tensor(values),
                rtol=rtol,
                atol=atol,
                msg=lambda text, q=quantity: f"{q}: {text}",
            )


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
    lr: float = 0.1,
    data: Callable[[Tensor], Tensor] = everything,
    **options: Any,
) -> Whole:
    # SGD: Adam's signs would carry a rounding of 1e-8 to 1e-4 in two steps.
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
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
