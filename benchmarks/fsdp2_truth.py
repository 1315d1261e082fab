"""Readings under FSDP2 on two real processes beside those of one process.

``python -m benchmarks.fsdp2_truth``; each rank is ``… RANK PORT FOLDER``. The model and
its batches are those of ``tests/watching/two_ranks.py``: the same numbers, split over
two ranks. Beside us: what a hook on one rank reads of its own shard of the gradients,
and for how many parameters ``wandb.watch`` logs a gradient, if it does not raise.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import equipoise
from benchmarks.table import Row, publish
from tests.watching.models import batches, objective
from tests.watching.single_process import run_ranks, trained_whole
from tests.watching.two_ranks import fsdp, half, reported, train, without_batch_norm

READINGS = (
    "gradient.norm",
    "update.norm",
    "attention.max_logit",
    "attention.theta.mean",
    "residual.B",
    "precision.kappa_softmax",
)
NAME = "benchmarks.fsdp2_truth"


def on_a_rank(folder: Path) -> dict[str, Any]:
    """Watch, then read this rank's shard, then let ``wandb.watch`` read."""
    train(fsdp(without_batch_norm()), run=folder / "fsdp.eqp")
    logged = [_wandb(log, split=True) for log in ("all", "gradients")]
    return {"shard": _first_gradient(), "wandb": logged}


def _first_gradient() -> float:
    """Return the norm of the first step's gradient as one rank holds it."""
    model = fsdp(without_batch_norm())
    objective(model, half(next(iter(batches(1))))).backward()
    shards = [p.grad.to_local() for p in model.parameters() if p.grad is not None]  # type: ignore[attr-defined]
    return float(torch.stack([shard.norm() for shard in shards]).norm())


def _wandb(log: str, *, split: bool) -> dict[str, Any]:
    """Return for how many parameters it logs a gradient, or the error it ends with."""
    import wandb

    os.environ["WANDB_SILENT"] = "true"
    model = fsdp(without_batch_norm()) if split else without_batch_norm()
    run = wandb.init(mode="offline", dir=tempfile.mkdtemp())
    found: dict[str, Any] = {"log": log, "processes": 1 + split}
    found["parameters"] = len(list(model.parameters()))
    try:
        run.watch(model, log=log, log_freq=1)  # type: ignore[arg-type]
        for step, batch in enumerate(batches(2)):
            loss = objective(model, half(batch) if split else batch)
            loss.backward()
            run.log({"loss": loss.item()}, step=step)
        read = [k for k in dict(run.summary) if k.startswith("gradients/")]
        found["gradients"] = len(read)
    except RuntimeError as error:  # on every rank at the same call
        found["error"] = str(error)
    run.unwatch(model)
    run.finish()
    return found


def apart(run: equipoise.Run, truth: equipoise.Run, reading: str) -> float:
    """Return the largest difference from one process, relative to the largest value."""
    found, expected = run.series(reading), truth.series(reading)
    assert found.keys() == expected.keys()
    pairs = [
        (torch.tensor(found[site][1]), torch.tensor(values))
        for site, (_, values) in expected.items()
    ]
    largest = max(float(values.abs().max()) for _, values in pairs)
    return max(float((a - b).abs().max()) for a, b in pairs) / largest


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        ranks = run_ranks(NAME, folder, ranks=2)
        run = equipoise.open_run(folder / "fsdp.eqp")
        truth = trained_whole(without_batch_norm(), folder / "one.eqp", clip=True).run
        rows: list[Row] = [
            {"monitor": "equipoise", "reads": name, "apart": apart(run, truth, name)}
            for name in READINGS
        ]
        whole = float(truth.series("gradient.norm.total")[""][1].flatten()[0])
    shard = max(abs(rank["shard"] / whole - 1) for rank in ranks)
    rows.append({"monitor": "one rank's shard", "reads": "gradient", "apart": shard})
    logged = [_wandb("gradients", split=False), *ranks[0]["wandb"]]
    publish("fsdp2_truth", rows, wandb=logged, ranks=2)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        reported(on_a_rank, ranks=2)
    else:
        main()
