"""Keeps the outcome of each program on disk, so that a long run can go on."""

import json
import subprocess
from dataclasses import asdict
from pathlib import Path

from equipoise_lab.mistakes.case import Case
from equipoise_lab.mistakes.running import Outcome


def revision() -> str:
    """Return the commit of the code that runs, and whether it was changed since."""
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return told.stdout.strip() or "no revision"


class Journal:
    """Outcomes of one revision in a file, one a line; without a file, none is kept.

    Raises:
        ValueError: If the file was begun with another revision of the code.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._done: dict[tuple[str, bool], Outcome] = {}
        if path is None:
            return
        if not path.exists():
            path.write_text(json.dumps({"revision": revision()}) + "\n")
        begun, *lines = path.read_text().splitlines()
        if json.loads(begun) != {"revision": revision()}:
            raise ValueError(
                f"{path} was begun with other code ({begun}); this is {revision()}. "
                "Remove it to begin again, or check that code out to go on"
            )
        for line in lines:
            self._remember(Outcome(**json.loads(line)))

    def get(self, case: Case, *, wrong: bool) -> Outcome | None:
        """Return the outcome of a program in an earlier run, if it has one."""
        return self._done.get((case.name, wrong))

    def add(self, found: Outcome) -> None:
        """Keep an outcome, on disk at once."""
        self._remember(found)
        if self.path is not None:
            with self.path.open("a") as file:
                print(json.dumps(asdict(found)), file=file)

    def _remember(self, found: Outcome) -> None:
        self._done[found.case, found.wrong] = found
