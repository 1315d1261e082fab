"""Runs on a Ray cluster: machines need not share a disk."""

import tempfile
from pathlib import Path
from typing import Any

from equipoise.errors import MissingExtraError
from equipoise.lab.running.execution import RESULT, execute
from equipoise.lab.running.experiment import Task
from equipoise.lab.running.local import Failure, Watcher

FILES = ("run.eqp", RESULT)  # the result last: where it is, the run is complete


def run_on_ray(tasks: list[Task], root: Path, *, watcher: Watcher) -> list[Failure]:
    """Make the runs on the cluster ``ray.init`` finds; bring their files home."""
    ray = _ray()
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False)
    remote = ray.remote(num_cpus=1, max_retries=1)(_remote)
    jobs = {remote.remote(task.to_mapping()): task for task in tasks}
    failures: list[Failure] = []
    while jobs:
        ready, _ = ray.wait(list(jobs), num_returns=1)
        task = jobs.pop(ready[0])
        try:
            _bring_home(ray.get(ready[0]), root / task.folder)
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]
            failures.append(Failure(task=task, reason=reason))
        watcher(task, None)
    return failures


def _remote(given: dict[str, Any]) -> dict[str, bytes]:
    import torch

    torch.set_num_threads(1)
    task = Task.from_mapping(given)
    with tempfile.TemporaryDirectory() as place:
        execute(task, Path(place))
        folder = Path(place) / task.folder
        found = [folder / name for name in FILES if (folder / name).is_file()]
        return {path.name: path.read_bytes() for path in found}


def _bring_home(files: dict[str, bytes], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        draft = folder / f".{name}"
        draft.write_bytes(content)
        draft.rename(folder / name)


def _ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            'running on Ray needs ray: pip install "equipoise[ray]"'
        ) from error
    return ray
