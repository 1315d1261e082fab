"""Which mistakes of training programs are named, when, and what correct ones are told.

    python -m lab.benchmarks.mistakes                  the opened half
    python -m lab.benchmarks.mistakes --area loss      one area of relations.toml
    python -m lab.benchmarks.mistakes NAME …           some cases, finding by finding
    python -m lab.benchmarks.mistakes --sample         a few fast cases, as CI runs them
    python -m lab.benchmarks.mistakes --sealed         the first sealed half
    python -m lab.benchmarks.mistakes --sealed second --keep FILE
                                                       the second, going on from FILE

A sealed half is opened once, at the end. Programs run in a process apart: one that
hangs is ended after ``--limit`` seconds, and one that breaks does not end the run.
Every mistake is run with its correct twin, and every program is watched with
``checks="active"``: some mistakes show only when the input is changed. Shares carry
exact (Clopper-Pearson) 95 % intervals. A whole half is written to
``benchmarks/results``; a part goes to the screen, and with ``--json FILE`` to a file.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from scipy import stats

from benchmarks.table import machine, publish
from equipoise_lab.mistakes.case import CASES, Case, Half, relations_by_area
from equipoise_lab.mistakes.journal import Journal
from equipoise_lab.mistakes.running import Outcome, load, rates
from equipoise_lab.mistakes.worker import PROGRAM_SECONDS, Worker

HALVES: dict[str | None, tuple[Half, str]] = {
    None: ("opened", "mistakes"),
    "first": ("sealed", "mistakes_sealed"),
    "second": ("sealed_second", "mistakes_sealed_second"),
}
"""What ``--sealed`` was given → the half, and the name of its results."""

SAMPLE = (
    "labels_shifted_twice",
    "cross_entropy_of_probabilities",
    "accumulated_losses_not_divided",
    "targets_of_other_rows",
    "accumulation",
    "two_networks_in_turns",
)
"""Own loops of a second or two each, decided by the second sampled step."""


def area_of(case: Case) -> str:
    """Return the area of a case's first code; controls are an area of their own."""
    if case.is_control:
        return "controls"
    areas = relations_by_area().items()
    return next(area for area, codes in areas if case.codes[0] in codes)


def run(
    cases: Iterable[Case],
    journal: Journal | None = None,
    *,
    limit: float = PROGRAM_SECONDS,
) -> list[Outcome]:
    """Run each mistake and its twin, each control once, and say how it goes.

    What the journal holds is not run again.
    """
    done, journal = [], journal or Journal()
    with contextlib.closing(Worker(limit=limit)) as worker:
        for case in cases:
            for wrong in (True, False)[case.is_control :]:
                found = journal.get(case, wrong=wrong)
                if found is None:
                    found = worker.outcome(case, wrong=wrong, checks="active")
                    journal.add(found)
                done.append(found)
                print(_line(case, found), file=sys.stderr, flush=True)
    return done


def _line(case: Case, found: Outcome) -> str:
    said = ", ".join(f"{code}@{step}" for code, step in found.first.items()) or "-"
    if found.wrong:
        mark = "named " if found.named(case) else "MISSED"
    else:
        mark = "WARNED" if found.first else "quiet "
    program = "mistake" if found.wrong else "correct"
    error = f"  ({found.error})" if found.error else ""
    spent = f"{found.seconds:.1f} s"
    return f"{mark} {program} {case.name}: {found.state}: {said}  {spent}{error}"


def share(count: int, of: int) -> str:
    """Return k of n with its exact 95 % interval.

    >>> share(9, 10), share(0, 0)
    ('9/10 [55, 100] %', '0/0')
    """
    if not of:
        return "0/0"
    interval = stats.binomtest(count, of).proportion_ci(0.95, method="exact")
    low, high = 100 * interval.low, 100 * interval.high
    return f"{count}/{of} [{low:.0f}, {high:.0f}] %"


def area_row(
    area: str, cases: Sequence[Case], done: Sequence[Outcome]
) -> dict[str, Any]:
    """Return one row of the table: mistakes named, correct programs warned."""
    n = rates(cases, done)
    return {
        "area": area,
        "named": share(n["named"], n["mistakes"]),
        "by step 2": share(n["named by step 2"], n["mistakes"]),
        "called healthy": n["called healthy"],
        "correct, warned by a check": share(
            n["correct programs warned by a check"], n["correct programs"]
        ),
        "correct, warned at all": share(
            n["correct programs warned"], n["correct programs"]
        ),
        "correct, healthy": share(n["correct programs healthy"], n["correct programs"]),
    }


def table(cases: Sequence[Case], done: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return a line for each area, and one for all."""
    areas = dict.fromkeys(map(area_of, cases))
    rows = []
    for area in areas:
        here = [case for case in cases if area_of(case) == area]
        names = {case.name for case in here}
        rows.append(area_row(area, here, [o for o in done if o.case in names]))
    return [*rows, area_row("all", cases, done)]


def case_record(case: Case, done: Sequence[Outcome]) -> dict[str, Any]:
    """Return the record of one case: findings of its mistake and of its twin."""
    runs = {o.wrong: o for o in done if o.case == case.name}
    record: dict[str, Any] = {
        "case": case.name,
        "area": area_of(case),
        "kind": case.kind,
        "source": case.source,
    }
    if wrong := runs.get(True):
        named = {code: wrong.first[code] for code in case.codes if code in wrong.first}
        others = {k: v for k, v in wrong.first.items() if k not in case.codes}
        record |= {
            "codes": case.codes,
            "named": bool(named),
            "by step": min(named.values(), default=None),
            "other findings": others,
            "state": wrong.state,
            "error": wrong.error,
            "cpu seconds": round(wrong.seconds, 2),
        }
    if right := runs.get(False):
        record["correct program"] = {
            "warnings": right.first,
            "state": right.state,
            "error": right.error,
            "cpu seconds": round(right.seconds, 2),
        }
    return record


def chosen(given: argparse.Namespace) -> list[Case]:
    """Return the cases that were asked for.

    Raises:
        SystemExit: If a name or area is not known.
    """
    cases = load(HALVES[given.sealed][0])
    wanted = SAMPLE if given.sample else tuple(given.names)
    known = {case.name for case in cases}
    if unknown := sorted({*wanted} - known):
        raise SystemExit(f"no such case: {', '.join(unknown)}; known: {sorted(known)}")
    if wanted:
        cases = [CASES[name] for name in wanted]
    if given.area:
        cases = [case for case in cases if area_of(case) == given.area]
    if not cases:
        raise SystemExit(f"no case in area {given.area!r}: {list(relations_by_area())}")
    return cases


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lab.benchmarks.mistakes")
    parser.add_argument("names", nargs="*", help="cases; all of the half if none")
    parser.add_argument("--area", help="an area of relations.toml, or controls")
    parser.add_argument("--sample", action="store_true", help="the few that CI runs")
    parser.add_argument(
        "--sealed",
        nargs="?",
        const="first",
        choices=("first", "second"),
        help="a sealed half (put the names of cases before this)",
    )
    parser.add_argument("--keep", type=Path, help="outcomes so far: go on from there")
    parser.add_argument(
        "--limit",
        type=float,
        default=PROGRAM_SECONDS,
        help="seconds after which a program is ended",
    )
    parser.add_argument("--json", type=Path, help="where to write the record")
    return parser.parse_args(argv)


def main(argv: Sequence[str] = ()) -> None:
    given = arguments(argv)
    cases = chosen(given)
    done = run(cases, Journal(given.keep), limit=given.limit)
    rows = table(cases, done)
    records = [case_record(case, done) for case in cases]
    name = HALVES[given.sealed][1]
    if not (given.names or given.area or given.sample or given.json):
        publish(name, rows, cases=records)
        return
    for row in rows:
        print(*(f"{key}: {value}" for key, value in row.items()), sep="  ")
    if given.json:
        record = {"name": name, "machine": machine(), "rows": rows, "cases": records}
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
