"""Break one line of the code at a time, and see whether a test dies of it.

``python -m benchmarks.mutations [WORD…]`` runs those whose file or text holds one of
the words and whose file has changed since their last outcome, or all such by default;
``all`` as first word runs the others too. Each works on a copy of the tree: one line is
replaced, the tests named beside it run until the first fails. Outcomes are written one
by one. A mutation that survives is either a missing test or changes nothing that can be
seen; ``EQUIVALENT`` says why.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.mutation_list import EQUIVALENT, MUTATIONS, Mutation
from benchmarks.table import RESULTS, publish

ROOT = Path(__file__).parents[1]
LONGEST_S = 900


def outcome(mutation: Mutation, folder: Path) -> str:
    """Return whether the tests died of a mutation; the tree is left as it was."""
    path = folder / mutation.file
    text = path.read_text()
    if text.count(mutation.old) < 1:
        return "no such line"
    path.write_text(text.replace(mutation.old, mutation.new, 1))
    try:
        command = [sys.executable, "-m", "pytest", "-x", "-q", *mutation.tests.split()]
        paths = f"{folder / 'src'}{os.pathsep}{folder}"
        variables = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, timeout=LONGEST_S
        )
    except subprocess.TimeoutExpired:
        return f"not finished within {LONGEST_S} s"  # a busy machine kills nothing
    finally:
        path.write_text(text)
    known = {0: "survived", 1: "killed"}
    return known.get(done.returncode, f"pytest exit {done.returncode}")


def _code(mutation: Mutation) -> str:
    """Return which version of its file an outcome is of."""
    return hashlib.sha256((ROOT / mutation.file).read_bytes()).hexdigest()[:12]


def _known() -> dict[tuple[str, str], dict[str, str]]:
    """Return the last outcome of each mutation that still exists."""
    path = RESULTS / "mutations.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    listed = {(m.file, m.old.strip()) for m in MUTATIONS}
    rows = {(row["file"], row["line"]): row for row in rows}
    return {name: row for name, row in rows.items() if name in listed}


def _wanted(
    words: Sequence[str], known: dict[tuple[str, str], dict[str, str]]
) -> list[Mutation]:
    again, words = "all" in words[:1], [word for word in words if word != "all"]
    chosen = [
        m for m in MUTATIONS if not words or any(w in m.file + m.old for w in words)
    ]
    current = {name for name, row in known.items() if "code" in row}
    return [
        m
        for m in chosen
        if again
        or (m.file, m.old.strip()) not in current
        or known[m.file, m.old.strip()]["code"] != _code(m)
    ]


def _written(known: dict[tuple[str, str], dict[str, str]]) -> None:
    rows = list(known.values())
    survived = sum(r["outcome"] == "survived" and not r["why"] for r in rows)
    current = {(m.file, m.old.strip()): _code(m) for m in MUTATIONS}
    fresh = sum(r.get("code") == current[r["file"], r["line"]] for r in rows)
    counts = {"listed": len(MUTATIONS), "recorded": len(rows), "current": fresh}
    publish("mutations", rows, **counts, survived=survived)


def main(words: Sequence[str] = ()) -> None:
    known = _known()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv", "site", "*.eqp", "results")
        shutil.copytree(ROOT, tree, ignore=ignored)
        for mutation in _wanted(words, known):
            row = {"file": mutation.file, "line": mutation.old.strip()}
            row["outcome"] = outcome(mutation, tree)
            row["why"] = EQUIVALENT.get(mutation.old.strip(), "")
            row["code"] = _code(mutation)
            known[mutation.file, row["line"]] = row
            _written(known)


if __name__ == "__main__":
    main(sys.argv[1:])
