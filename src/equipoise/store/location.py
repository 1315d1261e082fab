"""Where run files are: the runs directory, and the name of a new run."""

import os
import re
import secrets
from datetime import UTC, datetime
from pathlib import Path

from equipoise.errors import RunFileError

SUFFIX = ".eqp"


def runs_directory() -> Path:
    """Return ``$EQUIPOISE_RUNS``, or ``./runs``: where report and board look too."""
    return Path(os.environ.get("EQUIPOISE_RUNS") or "runs")


def run_path(run: str | os.PathLike[str] | None, name: str) -> Path:
    """Return the path as given, or a fresh ``NAME-UTC-xxxx.eqp`` among the runs.

    >>> run_path("here/mine.eqp", "gpt2").as_posix()
    'here/mine.eqp'
    """
    if run is not None:
        return Path(run).expanduser()
    plain = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    # secrets, not random: the user's random numbers must not move.
    return runs_directory() / f"{plain}-{moment}-{secrets.token_hex(2)}{SUFFIX}"


def run_files(directory: Path, *, recursive: bool = False) -> list[Path]:
    """Return the run files of a directory, newest first; broken links come last."""
    pattern = f"**/*{SUFFIX}" if recursive else f"*{SUFFIX}"
    return sorted(
        directory.glob(pattern), key=lambda path: (_age(path), path), reverse=True
    )


def _age(path: Path) -> float:
    """Return when a run was last written; its journal counts, while it is live."""
    return max(_changed(path), _changed(path.with_name(path.name + "-wal")))


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # a link to nothing, or a file that has just gone
        return 0.0


def newest(directory: Path) -> Path:
    """Return the newest run of a directory and of those inside it, or say so."""
    found = [p for p in run_files(directory, recursive=True) if p.is_file()]
    if not found:
        raise RunFileError(
            f"no {SUFFIX} file in {directory}/: give one, or set EQUIPOISE_RUNS"
        )
    return found[0]
