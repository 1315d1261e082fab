"""Break one line of the code at a time, and see whether a test dies of it.

``python -m benchmarks.mutations [WORD…]`` runs those whose file or text holds one of
the words and whose file has changed since their last outcome, or all such by default;
``all`` as first word runs the others too. Each works on a copy of the tree: one line is
replaced, the tests named beside it run until the first fails; without the mutation they
must pass. Outcomes are written one by one. A mutation that survives is either a missing
test or changes nothing that can be seen; ``EQUIVALENT`` says why.
"""

import functools
import hashlib
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import hypothesis  # noqa: F401
import numba  # noqa: F401
import pytest
import torch  # noqa: F401

from benchmarks.mutation_list import EQUIVALENT, MUTATIONS, Mutation
from benchmarks.table import RESULTS, publish

ROOT = Path(__file__).parents[1]
LONGEST_S = 900


def outcome(mutation: Mutation, folder: Path) -> dict[str, str]:
    """Return whether a test died of a mutation, and which; the tree stays as it was."""
    path = folder / mutation.file
    text = path.read_text()
    if mutation.old not in text:
        return {"outcome": "no such line"}
    if _unbroken(mutation.tests, folder)["outcome"] != "survived":
        return {"outcome": "its tests fail without it"}
    replace(path, text.replace(mutation.old, mutation.new, 1))
    try:
        return tested(mutation.tests, folder)
    finally:
        replace(path, text)


def replace(path: Path, text: str) -> None:
    path.write_text(text)
    # Compiled code is told from older by seconds: two mutations may share one.
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def tested(tests: str, folder: Path) -> dict[str, str]:
    """Run tests until the first fails; its name is returned with the outcome."""
    output = folder / "output.txt"
    # Forked: torch is loaded once, and nothing of ours is loaded here.
    process = multiprocessing.get_context("fork").Process(
        target=_run, args=(tests.split(), folder, output)
    )
    process.start()
    process.join(LONGEST_S)
    if process.exitcode is None:
        os.killpg(process.pid or 0, signal.SIGKILL)  # with the ranks a test has started
        process.join()
        return {"outcome": f"not finished within {LONGEST_S} s"}  # no kill
    known = {0: "survived", 1: "killed"}
    result = {"outcome": known.get(process.exitcode, f"exit {process.exitcode}")}
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output.read_text(), re.M)
    return result if found is None else {**result, "by": found[1]}


_unbroken = functools.cache(tested)


def _run(tests: list[str], folder: Path, output: Path) -> NoReturn:
    """Run pytest on the copy of the tree, as a process of its own would."""
    os.setsid()
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    ours = [str(folder / "src"), str(folder)]
    os.environ["PYTHONPATH"] = os.pathsep.join(ours)
    theirs = {"", str(ROOT), str(ROOT / "src")}
    sys.path[:] = [*ours, *(place for place in sys.path if place not in theirs)]
    for name in [n for n in sys.modules if n.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]
    code = pytest.main(["-x", *tests])
    sys.stdout.flush()
    os._exit(code)


def code_of(mutation: Mutation, folder: Path = ROOT) -> str:
    """Return which version of its file an outcome is of."""
    return hashlib.sha256((folder / mutation.file).read_bytes()).hexdigest()[:12]


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
        or known[m.file, m.old.strip()]["code"] != code_of(m)
    ]


def _written(known: dict[tuple[str, str], dict[str, str]]) -> None:
    rows = list(known.values())
    survived = sum(r["outcome"] == "survived" and not r["why"] for r in rows)
    current = {(m.file, m.old.strip()): code_of(m) for m in MUTATIONS}
    fresh = sum(r.get("code") == current[r["file"], r["line"]] for r in rows)
    counts = {"listed": len(MUTATIONS), "recorded": len(rows), "current": fresh}
    publish("mutations", rows, **counts, survived=survived)


def copy_tree(folder: Path) -> Path:
    """Copy the repository, without what is built or installed in it."""
    ignored = shutil.ignore_patterns(".git", ".venv", "site", "coverage-report")
    return Path(shutil.copytree(ROOT, folder / "tree", ignore=ignored))


def main(words: Sequence[str] = ()) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(Path(folder))
        for mutation in _wanted(words, _known()):
            row = {"file": mutation.file, "line": mutation.old.strip()}
            row |= outcome(mutation, tree)
            row["why"] = EQUIVALENT.get(mutation.old.strip(), "")
            row["code"] = code_of(mutation, tree)
            _written(_known() | {(mutation.file, row["line"]): row})


if __name__ == "__main__":
    main(sys.argv[1:])
