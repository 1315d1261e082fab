"""Damage run files in many ways, and count what a reader then shows as if it were true.

``python -m benchmarks.mutated_runs [MUTATIONS]``; 2,000 unless said otherwise. A
mutation flips a bit or a byte, overwrites, zeroes, removes or swaps stretches. Each
outcome is one of: *refused* (our own error), *unchanged* (all that is shown is what was
written), *reported* (the rest is shown, and ``run.damage`` says that some is missing),
*silent* (something differs, and nothing says so), *wrong* (a value that was not written
is shown, reported or not), *foreign* (an exception that is not ours).
"""

import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.table import publish
from equipoise.errors import EquipoiseError
from equipoise.records import Applied, Finding, Reading, RunInfo
from equipoise.store import RunWriter, open_run

INFO = RunInfo(
    name="mutated",
    created="2026-11-15T00:00:00+00:00",
    version="0",
    details={"layers": 4, "note": "a run to be damaged"},
)
PAGE = 4096
NAMED = re.compile(r"Reading\(step=(?P<step>\d+), quantity='(?P<quantity>[^']*)'")
View = dict[str, Any]
"""What was asked → what is shown: for many things, key → value."""
Bin = tuple[tuple[str, ...], tuple[str, ...]]
"""First step, last step and rows; low, mean, high and broken."""


def write_run(path: Path, *, steps: int = 260) -> None:
    """Write a run with everything a run may hold, some steps twice."""
    rng = random.Random(7)
    sites = tuple(f"blocks.{layer}.attention" for layer in range(4))
    with RunWriter(path, INFO) as writer:
        for step in [*range(steps), *range(steps - 20, steps + 20)]:
            heads = tuple(tuple(rng.random() for _ in range(3)) for _ in sites)
            theta = Reading(step=step, quantity="theta", sites=sites, values=heads)
            readings = [Reading.scalar(step, "loss", rng.random() + 1), theta]
            readings += [Reading.scalar(step, f"q{k}", step + k / 7) for k in range(2)]
            findings = [_finding(step)] if step % 40 == 3 else []
            applied = [Applied(step=step, remedy="epsilon")] if step == 100 else []
            writer.append(readings, findings=findings, applied=applied)


def _finding(step: int) -> Finding:
    return Finding(step=step, severity="warn", code="r", message=f"step {step}")


def shown(path: Path) -> tuple[View, list[str]]:
    """Return all that a reader of the file is shown, and the damage it is told of."""
    run = open_run(path)
    view: View = {"info": {"info": run.info.to_json()}}
    view["steps"] = {int(step): True for step in run.steps}
    view["quantities"] = {name: True for name in run.quantities}
    view["findings"] = {
        f.to_json(): True for f in run.findings if f.code != "store.damaged"
    }
    view["applied"] = {a.to_json(): True for a in run.applied}
    for name in run.quantities:
        first, last = run.ends(name)
        view[f"ends of {name}"] = {"first": repr(first), "last": repr(last)}
        for site, (steps, values) in run.series(name).items():
            rows = zip(steps.tolist(), values.tolist(), strict=True)
            view[f"series {name} {site}"] = {s: repr(v) for s, v in rows}
        view |= _summaries(run, name)
    view["since"] = _all_since(run)
    return view, run.damage


def _summaries(run: Any, name: str) -> View:
    view: View = {}
    asked = [{"level": k} for k in range(3)] + [{"between": (90, 150), "points": 20}]
    for options in asked:
        for site, found in run.summary(name, **options).items():
            stretch = (found.first, found.last, found.rows)
            numbers = (found.low, found.mean, found.high, found.broken)
            view[f"summary {name} {site} {options}"] = {
                # Steps that were written twice make two bins of one stretch.
                (bin[:3], bin[3:]): True
                for bin in _zipped(*stretch, *numbers)
            }
    return view


def _zipped(*columns: Any) -> list[tuple[str, ...]]:
    lists = [column.tolist() for column in columns]
    return [tuple(map(repr, row)) for row in zip(*lists, strict=True)]


def _all_since(run: Any) -> dict[str, bool]:
    found, cursor = {}, 0
    while True:
        news, after = run.since(cursor, limit=500)
        things = [*news.readings, *news.findings, *news.applied]
        found |= {repr(thing): True for thing in things}
        if after == cursor:
            return found
        cursor = after


def outcome(path: Path, truth: View) -> str:
    """Return what became of a reader of a mutated file."""
    try:
        view, damage = shown(path)
    except EquipoiseError:
        return "refused"
    except Exception as error:
        return f"foreign {type(error).__name__}"
    if view == truth:
        return "reported" if damage else "unchanged"
    if not damage:
        return "silent"
    return "wrong" if any(_is_wrong(view, truth)) else "reported"


def _is_wrong(view: View, truth: View) -> Any:
    """Yield whether something is shown that was never written.

    A bin over the rows that are left may differ from the one over all rows, and the
    ends of a series are those of what is left of it.
    """
    written: dict[tuple[str, int], list[str]] = {}
    for reading in truth["since"]:
        if named := NAMED.match(reading):
            key = (named["quantity"], int(named["step"]))
            written.setdefault(key, []).append(reading)
    for asked, cells in view.items():
        if asked.startswith("ends"):
            yield any(cell not in truth["since"] for cell in cells.values())
        elif asked.startswith("series"):
            expected = truth.get(asked, {})
            old = {k: v for k, v in cells.items() if expected.get(k) != v}
            yield bool(old) and not _written_earlier(asked, old, written)
        elif asked.startswith("summary"):
            stretches = {stretch for stretch, _ in truth[asked]}
            known = [b for b in cells if b[0] in stretches]
            yield any(not _one_of(b, truth[asked]) for b in known)
        else:
            yield any(key not in truth[asked] for key in cells)


def _one_of(found: Bin, written: dict[Bin, bool]) -> bool:
    """Say whether a bin was written, or is of the same rows added in another order."""
    alike = (numbers for stretch, numbers in written if stretch == found[0])
    mine = _floats(found[1])
    return any(np.allclose(mine, _floats(n), rtol=1e-12, atol=0) for n in alike)


def _floats(texts: tuple[str, ...]) -> list[float]:
    return [float(text) for text in texts]


def _written_earlier(
    asked: str, cells: dict[int, str], written: dict[tuple[str, int], list[str]]
) -> bool:
    """Say whether values are those of steps written twice, the later one damaged."""
    _, name, *_ = asked.split(" ")
    return all(
        any(value.strip("[]") in reading for reading in written.get((name, step), []))
        for step, value in cells.items()
    )


def _flip_bit(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _change_byte(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= rng.randrange(1, 256)


def _overwrite(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    size = min(rng.randrange(2, 64), len(data) - start)
    data[start : start + size] = rng.randbytes(size)


def _zero(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    size = min(rng.choice((8, 64, 512, PAGE)), len(data) - start)
    data[start : start + size] = bytes(size)


def _truncate(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def _remove(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    del data[start : start + rng.randrange(1, 32)]


def _swap_pages(data: bytearray, rng: random.Random) -> None:
    a, b = (PAGE * rng.randrange(len(data) // PAGE) for _ in range(2))
    data[a : a + PAGE], data[b : b + PAGE] = data[b : b + PAGE], data[a : a + PAGE]


def _repeat_page(data: bytearray, rng: random.Random) -> None:
    a, b = (PAGE * rng.randrange(len(data) // PAGE) for _ in range(2))
    data[a : a + PAGE] = data[b : b + PAGE]


MUTATIONS: dict[str, Callable[[bytearray, random.Random], None]] = {
    "flip a bit": _flip_bit,
    "change a byte": _change_byte,
    "overwrite a stretch": _overwrite,
    "zero a stretch": _zero,
    "truncate": _truncate,
    "remove bytes": _remove,
    "swap two pages": _swap_pages,
    "repeat a page": _repeat_page,
}
WEIGHTS = (6, 8, 4, 2, 1, 1, 1, 1)


def campaign(folder: Path, count: int, *, seed: int = 0) -> dict[str, Counter[str]]:
    """Return, for each kind of mutation, how often each outcome came."""
    sound, path = folder / "sound.eqp", folder / "mutated.eqp"
    write_run(sound)
    truth, damage = shown(sound)
    assert not damage
    original, rng = sound.read_bytes(), random.Random(seed)
    found: dict[str, Counter[str]] = {}
    for kind in rng.choices(list(MUTATIONS), WEIGHTS, k=count):
        data = bytearray(original)
        MUTATIONS[kind](data, rng)
        path.write_bytes(data)
        found.setdefault(kind, Counter())[outcome(path, truth)] += 1
    return found


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    with tempfile.TemporaryDirectory() as folder:
        found = campaign(Path(folder), count)
    total: Counter[str] = sum(found.values(), Counter())
    rows = [
        {"mutation": kind, "files": sum(outcomes.values()), **outcomes}
        for kind, outcomes in [*found.items(), ("all", total)]
    ]
    publish("mutated_runs", rows, mutations=count, **total)


if __name__ == "__main__":
    main()
