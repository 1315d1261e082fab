"""A second reader's labels, from sheets that hide ours.

``python -m lab.benchmarks.claims_reader sheets FILE`` writes a sheet for every claim in
an order drawn at random: the place in the paper, the statement, its kind, what is
computed, what the parts ask, what was checked in its place, whether a restriction is
named, and the numbers. It hides the name, the label, the check's own rule and each
part's outcome: these the reader finds. ``… compare FILE LABELS`` (a JSON object: number
of a sheet → label) counts how often the reader gave our label. The reader is told the
rule of ``equipoise_lab.claims.rules`` and nothing else.

The committed labels are those of a reader who had seen nothing of this project. He was
the second: the first, as blind, gave 131 of 152 labels, and what his sheets hid of the
evidence was then added to them. So the count is of sheets that a reading had changed.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from scipy.stats import binomtest

from benchmarks.table import publish
from equipoise_lab.claims import catalogue
from equipoise_lab.claims.result import BARE, CAVEAT, IN_PLACE, PART, ClaimResult

SEED = 20261119


def sheet(number: int, one: ClaimResult) -> dict[str, Any]:
    hidden = {BARE, CAVEAT, IN_PLACE}
    parts = [k.removeprefix(PART) for k in one.evidence if k.startswith(PART)]
    numbers = {
        name: value
        for name, value in one.evidence.items()
        if not name.startswith(PART) and name not in hidden
    }
    return {
        "sheet": number,
        "paper": one.paper,
        "place": one.where,
        "statement": one.statement,
        "computed": one.statistic,
        "asked": parts,
        "kind": one.kind,
        "checked in its place": one.instead if IN_PLACE in one.evidence else "",
        "a restriction is named": CAVEAT in one.evidence,
        "no part has an interval": BARE in one.evidence,
        "numbers": numbers,
    }


def ordered() -> list[ClaimResult]:
    found = catalogue.run(catalogue.select())
    random.Random(SEED).shuffle(found)
    return found


def sheets(path: Path) -> None:
    found = ordered()
    lines = [
        json.dumps(sheet(n, one), ensure_ascii=False) for n, one in enumerate(found)
    ]
    path.write_text("\n".join(lines))
    key = {n: (one.id, one.verdict) for n, one in enumerate(found)}
    path.with_suffix(".key.json").write_text(json.dumps(key))


def compare(path: Path, labels: Path) -> None:
    key = json.loads(path.with_suffix(".key.json").read_text())
    read = json.loads(labels.read_text())
    rows = [
        {"claim": claim, "label": label, "reader": read[n], "same": label == read[n]}
        for n, (claim, label) in key.items()
    ]
    same = sum(row["same"] for row in rows)
    exact = binomtest(same, len(rows)).proportion_ci(0.95, "exact")
    ends = {"from": float(exact.low), "to": float(exact.high)}
    publish("claims_reader", rows, claims=len(rows), same=same, **ends)


def main() -> None:
    match sys.argv[1:]:
        case ["sheets", path]:
            sheets(Path(path))
        case ["compare", path, labels]:
            compare(Path(path), Path(labels))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
