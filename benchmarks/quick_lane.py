"""How many of the listed mutations die in the lane of every commit, and by which test.

``python -m benchmarks.quick_lane [WORD…]`` breaks each line of ``mutation_list`` whose
file or text holds one of the words (all by default) and that has no outcome for the
present code. First it runs the tests that the list names, those of the lane alone. Then
the lane runs once under coverage, and what is left alive meets every test of the lane
that enters its line. Coverage sees no compiled kernel: there the named tests decide.
The bar is four mutations of five.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import coverage

from benchmarks.mutation_list import EQUIVALENT, MUTATIONS, Mutation
from benchmarks.mutations import ROOT, code_of, copy_tree, replace, tested
from benchmarks.table import RESULTS, publish

LISTED = [m for m in MUTATIONS if m.old.strip() not in EQUIVALENT]
Row = dict[str, str]
Entered = Mapping[str, Mapping[int, Sequence[str]]]
"""File → line → the tests of the lane that enter it."""


def lane_coverage(tree: Path) -> Entered:
    """Run the lane once, and return which of its tests enter which lines."""
    data, settings = tree / "lane.data", tree / "lane.ini"
    settings.write_text(
        f"[run]\ndata_file = {data}\nsource_pkgs = equipoise\n"
        "dynamic_context = test_function\n"
    )
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}"]
    variables = {**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"}
    subprocess.run(
        [*command, "-m", "pytest", "--quick", "-p", "no:cacheprovider"],
        cwd=tree,
        env=variables,
        check=True,
    )
    found = coverage.CoverageData(str(data))
    found.read()
    return {
        str(Path(file).relative_to(tree)): found.contexts_by_lineno(file)
        for file in found.measured_files()
    }


def node(context: str, tree: Path) -> str | None:
    """Return the test of a context such as ``tests.store.test_writer.test_close``."""
    module, _, name = context.rpartition(".")
    file = Path(*module.split(".")).with_suffix(".py")
    return f"{file}::{name}" if (tree / file).is_file() else None


def entering(mutation: Mutation, tree: Path, entered: Entered) -> str:
    """Return the tests of the lane that enter a line, as arguments of pytest."""
    before = (tree / mutation.file).read_text().partition(mutation.old)[0]
    first = before.count("\n") + 1
    lines = range(first, first + mutation.old.strip("\n").count("\n") + 1)
    contexts = {
        c for n in lines for c in entered.get(mutation.file, {}).get(n, ()) if c
    }
    nodes = {name for context in contexts if (name := node(context, tree))}
    return " ".join(sorted(nodes))


def outcome(mutation: Mutation, tree: Path, tests: str) -> Row:
    """Break a line, and return which of some tests of the lane dies, if any does."""
    path = tree / mutation.file
    text = path.read_text()
    if mutation.old not in text:
        return {"outcome": "no such line"}
    replace(path, text.replace(mutation.old, mutation.new, 1))
    try:
        found = tested(f"--quick {tests}", tree)
    finally:
        replace(path, text)
    # 5: the lane has none of the tests that the list names.
    return {"outcome": "not in the lane"} if found["outcome"] == "exit 5" else found


def key(mutation: Mutation) -> tuple[str, str]:
    return mutation.file, mutation.old.strip()


def known() -> dict[tuple[str, str], Row]:
    """Return the outcomes of the present code, as any process has left them."""
    path = RESULTS / "quick_lane.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    current = {key(m): code_of(m) for m in MUTATIONS if (ROOT / m.file).exists()}
    by_key = {(row["file"], row["line"]): row for row in rows}
    return {k: row for k, row in by_key.items() if current.get(k) == row["code"]}


def record(mutation: Mutation, found: Row) -> None:
    file, line = key(mutation)
    row = {"file": file, "line": line, **found, "code": code_of(mutation)}
    rows = [*(known() | {(file, line): row}).values()]
    killed = sum(row["outcome"] == "killed" for row in rows)
    publish("quick_lane", rows, listed=len(LISTED), outcomes=len(rows), killed=killed)


def main(words: Sequence[str] = ()) -> None:
    done = known()
    wanted = [
        m
        for m in LISTED
        if key(m) not in done
        and (not words or any(word in m.file + m.old for word in words))
    ]
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(Path(folder))
        alive = []
        for mutation in wanted:
            found = outcome(mutation, tree, mutation.tests)
            record(mutation, found)
            if found["outcome"] != "killed":
                alive.append((mutation, found))
        entered = lane_coverage(tree) if alive else {}
        for mutation, first in alive:
            tests = entering(mutation, tree, entered)
            found = outcome(mutation, tree, tests) if tests else first
            record(mutation, found)


if __name__ == "__main__":
    main(sys.argv[1:])
