"""An experiment of your own: two arms, two seeds, paired. Takes about a minute."""

import tempfile
from dataclasses import replace
from pathlib import Path

from equipoise_lab.models import GPTConfig
from equipoise_lab.results import results
from equipoise_lab.running.experiment import Arm, Experiment
from equipoise_lab.running.runner import run_experiment
from equipoise_lab.training.options import TrainOptions

SHAPE = GPTConfig(width=32, depth=2, heads=2, context=32)
TRAIN = TrainOptions(steps=60, warmup=6, watch=False)
EXPERIMENT = Experiment(
    name="rate",
    question="Is 1e-5 too slow?",
    arms=(
        Arm(name="1e-3", model=SHAPE, train=TRAIN),
        Arm(name="1e-5", model=SHAPE, train=replace(TRAIN, lr=1e-5)),
    ),
    seeds=(1, 2),
)

if __name__ == "__main__":  # runs are spawned processes, which import this file
    with tempfile.TemporaryDirectory() as place:
        assert run_experiment(EXPERIMENT, Path(place)) == []
        fast, slow = results(EXPERIMENT, Path(place))
    for row in (fast, slow):
        print(row.arm, row.values["validation"], row.against_first or "")
    assert slow.against_first is not None and slow.against_first.mean > 0
