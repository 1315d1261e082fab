"""What would end every run alike, found before the first of them starts."""

from collections.abc import Sequence

from equipoise.errors import EquipoiseError
from equipoise.lab.execution import data_of
from equipoise.lab.experiment import Task
from equipoise.watching.settings import chosen


def preflight(tasks: Sequence[Task]) -> None:
    """Raise what stops all of the runs; an arm that is alone in failing may do so.

    Looked at are the settings that watching takes from the environment and from
    ``equipoise.toml``, and the data.
    """
    by_arm = {task.arm.name: task for task in tasks}
    faults = [_fault(task) for task in by_arm.values()]
    if faults and all(faults):
        raise faults[0]  # type: ignore[misc]


def _fault(task: Task) -> EquipoiseError | None:
    train = task.arm.train
    try:
        if train.watch:
            chosen({"every": train.every, "at": train.at, "preset": train.preset})
        data_of(task)
    except EquipoiseError as error:
        return error
    return None
