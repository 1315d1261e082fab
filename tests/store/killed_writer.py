"""A writer that goes on until it is killed. Torch-free, so that it starts at once."""

import os
from multiprocessing.connection import Connection

from equipoise.records import Reading
from equipoise.store import RunWriter, open_run
from tests.store.example_runs import INFO, reading


def step_readings(step: int) -> list[Reading]:
    """Return a small sampled step: something per head, per layer and per model."""
    return [
        Reading.scalar(step, "loss", 1 / (step + 3)),
        reading(step, "norm", a=[step + 0.5], b=[step * 2.0]),
        reading(step, "theta", a=[step, -step], b=[step / 7, 2.0]),
    ]


def append_until_killed(path: str, acknowledge: Connection) -> None:
    """Continue the run, and report each step when it is committed."""
    with RunWriter(path, INFO) as writer:
        steps = open_run(path).steps
        step = int(steps[-1]) + 1 if len(steps) else 0
        while True:
            writer.append(step_readings(step))
            os.write(acknowledge.fileno(), step.to_bytes(8, "little"))
            step += 1
