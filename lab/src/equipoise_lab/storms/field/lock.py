"""Opens the locked part once, and writes down that it did.

Units may be made beforehand, in several sittings: nothing is judged and nothing of what
became of them is shown. The log's first line is written before anything is judged.
"""

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from equipoise.errors import InputError
from equipoise_lab.storms.field.bars import Counts, counts
from equipoise_lab.storms.field.judged import judge_all
from equipoise_lab.storms.field.making import make, missing
from equipoise_lab.storms.field.manifest import Unit
from equipoise_lab.storms.field.tables import as_json, line_of

LOG, UNITS = "opened.jsonl", "locked.jsonl"
"""When it was opened and what came out; and what was said of each unit."""


def refuse_if_opened(folder: Path) -> None:
    """Refuse where the locked part was opened before.

    Raises:
        InputError: With the first line of the log.
    """
    path = folder / LOG
    if path.exists() and (lines := path.read_text(encoding="utf-8").splitlines()):
        raise InputError(
            f"the locked part was opened before ({path}: {lines[0]}): a second look "
            "would no longer be at unseen units; draw a new part under a new seed"
        )


def open_once(
    units: Sequence[Unit],
    folder: Path,
    report: Callable[[str], None],
    commit: str,
    *,
    recorded: bool = False,
) -> Counts:
    """Make what is missing of the locked part, then judge it for the only time.

    ``recorded`` makes nothing and judges what was made before; the log says how many
    of the manifest's units that is, before anything is judged.
    """
    refuse_if_opened(folder)
    if not recorded:
        make(units, folder, report)
    left = missing(units, folder)
    if left and not recorded:
        raise InputError(
            f"{len(left)} units were refused by the instrument, the first "
            f"{left[0].name}: nothing was judged, and the lock still holds"
        )
    names = [unit.name for unit in left]
    here = [unit for unit in units if unit not in left]
    _append(folder, {"opened": commit, "units": len(here), "left out": names})
    found = judge_all(here, folder)
    lines = "".join(json.dumps(line_of(one)) + "\n" for one in found)
    (folder / UNITS).write_text(lines, encoding="utf-8")
    summed = counts(found)
    _append(folder, {"counts": as_json(summed)})
    return summed


def _append(folder: Path, line: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    with (folder / LOG).open("a", encoding="utf-8") as log:
        log.write(json.dumps({"at": now, **line}) + "\n")
