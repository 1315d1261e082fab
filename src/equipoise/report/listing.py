"""The runs of a directory, one line each."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from equipoise.errors import RunFileError
from equipoise.store import Run, open_run
from equipoise.store.location import run_files


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A run in a list; one that cannot be read keeps its line and says why."""

    path: Path
    name: str = ""
    created: str = ""
    last_step: int | None = None
    severities: Mapping[str, int] = field(default_factory=dict)
    trouble: str = ""


def listing(directory: Path) -> list[Listed]:
    """Return the runs of a directory, newest first."""
    return [_listed(path) for path in run_files(directory)]


def _listed(path: Path) -> Listed:
    try:
        return _read(path, open_run(path))
    except RunFileError as error:
        return Listed(path=path, trouble=str(error))


def _read(path: Path, run: Run) -> Listed:
    steps = run.steps
    return Listed(
        path=path,
        name=run.info.name,
        created=run.info.created,
        last_step=int(steps[-1]) if len(steps) else None,
        severities=Counter(finding.severity for finding in run.findings),
    )
