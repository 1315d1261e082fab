"""How many of the listed mutations die in the lane of every commit, and by which test.

``python -m benchmarks.quick_lane [WORD…]`` breaks each line of ``mutation_list`` whose
file or text holds one of the words (all by default). First it runs the tests that the
list names for it, those of the lane alone; when none fails, every test of the lane that
enters the line, as one run of the lane under coverage has seen. What a compiled kernel
does no coverage sees: there the named tests decide. The bar is four mutations of five.
"""

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import coverage

from benchmarks.mutation_list import EQUIVALENT, MUTATIONS, Mutation
from benchmarks.mutations import code_of, copy_tree, replace, tested
from benchmarks.table import publish

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


def outcome(mutation: Mutation, tree: Path, entered: Entered) -> Row:
    """Break a line, and return which test of the lane dies of it, if any does."""
    path = tree / mutation.file
    text = path.read_text()
    if mutation.old not in text:
        return {"outcome": "no such line"}
    others = entering(mutation, tree, entered)
    replace(path, text.replace(mutation.old, mutation.new, 1))
    try:
        found = tested(f"--quick {mutation.tests}", tree)
        if found["outcome"] != "killed" and others:
            found = tested(f"--quick {others}", tree)
    finally:
        replace(path, text)
    # 5: the lane has none of the tests that the list names.
    return {"outcome": "not in the lane"} if found["outcome"] == "exit 5" else found


def main(words: Sequence[str] = ()) -> None:
    wanted = [
        m
        for m in MUTATIONS
        if m.old.strip() not in EQUIVALENT
        and (not words or any(word in m.file + m.old for word in words))
    ]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(Path(folder))
        entered = lane_coverage(tree)
        for mutation in wanted:
            row = {"file": mutation.file, "line": mutation.old.strip()}
            row |= outcome(mutation, tree, entered)
            rows.append({**row, "code": code_of(mutation, tree)})
            counts = Counter(row["outcome"] for row in rows)
            share = counts["killed"] / len(rows)
            publish("quick_lane", rows, **counts, share_killed=share)


if __name__ == "__main__":
    main(sys.argv[1:])
