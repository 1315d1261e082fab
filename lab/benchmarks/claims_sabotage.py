"""Sabotage the checks of claims: a verdict that cannot change is no verdict.

``python -m lab.benchmarks.claims_sabotage [CLAIM]``. One operation of a check's own
body is changed at a time (a comparison turned round, a sum into a difference, a product
into a quotient, a number into another), and the check is run again. A claim passes when
some change of this kind gives another verdict; what changed it first is listed. Checks
that read committed results are sabotaged there: arms change places, numbers are
spoiled.
"""

import ast
import copy
import inspect
import json
import random
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.table import RESULTS, publish
from equipoise_lab.claims import catalogue, published_results
from equipoise_lab.claims.result import Claim

TURNED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}
MOST = 24
"""Changes tried before a claim is called one that cannot change."""


def places(tree: ast.AST) -> list[tuple[int, int]]:
    """Return what can be changed: the node's number, and which of its operators."""
    found = []
    for number, node in enumerate(ast.walk(tree)):
        if isinstance(node, ast.Compare):
            found += [
                (number, i) for i, op in enumerate(node.ops) if type(op) in TURNED
            ]
        elif isinstance(node, ast.BinOp) and type(node.op) in TURNED:
            found.append((number, 0))
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            found.append((number, 0))
    return found


def changed(tree: ast.Module, place: tuple[int, int]) -> tuple[ast.Module, str]:
    """Return the check with one operation changed, and what was changed."""
    made = copy.deepcopy(tree)
    node = list(ast.walk(made))[place[0]]
    before = ast.unparse(node)
    if isinstance(node, ast.Compare):
        node.ops[place[1]] = TURNED[type(node.ops[place[1]])]()  # type: ignore[call-overload]
    elif isinstance(node, ast.BinOp):
        node.op = TURNED[type(node.op)]()  # type: ignore[assignment]
    elif isinstance(node, ast.Constant):
        node.value = -3.7 * node.value - 1.3 if type(node.value) is float else 1
    return made, f"{before} → {ast.unparse(node)}"


def sabotaged(claim: Claim) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what was changed, and the changed check, in an order drawn by the id."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(claim.check)))
    (function,) = tree.body
    assert isinstance(function, ast.FunctionDef)
    function.decorator_list = []
    chosen = places(tree)
    random.Random(claim.id).shuffle(chosen)
    # Comparisons first: they are where verdicts are made.
    nodes = list(ast.walk(tree))
    chosen.sort(key=lambda place: not isinstance(nodes[place[0]], ast.Compare))
    for place in chosen[:MOST]:
        made, what = changed(tree, place)
        space = dict(claim.check.__globals__)
        exec(compile(ast.fix_missing_locations(made), "sabotage", "exec"), space)
        yield what, space[function.name]


def kills(claim: Claim) -> tuple[str, str]:
    """Return the first change that gave another verdict, and that verdict."""
    honest = str(claim.check()[0])
    for what, check in sabotaged(claim):
        try:
            verdict = str(check()[0])
        except Exception:  # a check that cannot run gives no verdict
            continue
        if verdict != honest:
            return what, verdict
    return "", honest


Table = dict[str, Any]
"""Arm → what was read of it: the runs of an experiment, or one of its curves."""


def numbers_changed(given: Any, change: Callable[[float], float]) -> Any:
    """Return the same lists and tables with every number changed."""
    if isinstance(given, dict):
        kept = {"x", "seed", "actions"}  # where a number was read is not the number
        return {
            k: v if k in kept else numbers_changed(v, change) for k, v in given.items()
        }
    if isinstance(given, list):
        return [numbers_changed(v, change) for v in given]
    return change(given) if isinstance(given, float) else given


def _power(x: float) -> float:
    """Return |x|²⁵: what is nearly flat is flat no longer."""
    return min(abs(x), 1e12) ** 25


def _rotated(given: Table) -> Table:
    names = list(given)
    return dict(zip(names, [given[n] for n in names[1:] + names[:1]], strict=True))


def _later_smaller(given: Table) -> Table:
    return {
        arm: numbers_changed(held, lambda x, n=n: x / (1 + n))  # type: ignore[misc]
        for n, (arm, held) in enumerate(given.items())
    }


def _of_each_run(given: Table, change: Callable[[Table], Table]) -> Table:
    """Return the same arms with every run's measures changed; curves stay."""
    return {
        arm: {
            seed: change(run) if isinstance(run, dict) else run
            for seed, run in held.items()
        }
        if isinstance(held, dict)
        else held
        for arm, held in given.items()
    }


def _measures_reversed(given: Table) -> Table:
    """Give every measure of a run the number of the one opposite in the list."""
    return _of_each_run(
        given, lambda run: dict(zip(run, reversed(run.values()), strict=True))
    )


def _later_measures_smaller(given: Table) -> Table:
    return _of_each_run(
        given, lambda run: {k: v / 10**n for n, (k, v) in enumerate(run.items())}
    )


def _rows_of_one_number(given: Any) -> Any:
    if isinstance(given, dict):
        return {k: _rows_of_one_number(v) for k, v in given.items()}
    if isinstance(given, list) and any(isinstance(v, float) for v in given):
        first = next(v for v in given if isinstance(v, float))
        return [first if isinstance(v, float) else v for v in given]
    if isinstance(given, list):
        return [_rows_of_one_number(v) for v in given]
    return given


SPOILED: dict[str, Callable[[Table], Table]] = {
    "arms rotated": _rotated,
    "numbers inverted": lambda t: numbers_changed(t, lambda x: 1 / x if x else x),
    "signs turned": lambda t: numbers_changed(t, lambda x: -x),
    "numbers divided by 100": lambda t: numbers_changed(t, lambda x: x / 100),
    "numbers times 1.3": lambda t: numbers_changed(t, lambda x: 1.3 * x),
    "sizes to the power 3.5": lambda t: numbers_changed(t, lambda x: abs(x) ** 3.5),
    "sizes to the power 25": lambda t: numbers_changed(t, _power),
    "later arms divided": _later_smaller,
    "measures reversed": _measures_reversed,
    "later measures divided": _later_measures_smaller,
    "rows of one number": _rows_of_one_number,
}


def spoil(root: Path, ways: dict[str, Callable[[Table], Table]] = SPOILED) -> None:
    """Write the committed results once for each way to spoil them."""
    for raw in published_results.BUILT.glob("*/raw.json"):
        given = json.loads(raw.read_text())
        for what, change in ways.items():
            place = root / what / raw.parent.name
            place.mkdir(parents=True)
            curves = {name: change(held) for name, held in given["curves"].items()}
            spoiled = {**given, "runs": change(given["runs"]), "curves": curves}
            (place / "raw.json").write_text(json.dumps(spoiled))


def experiment_kills(claim: Claim, root: Path) -> tuple[str, str]:
    """Return how results had to be spoiled for another verdict, and that verdict."""
    honest = claim.run().verdict
    for what in SPOILED:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(published_results.VARIABLE, str(root / what))
            try:
                verdict = claim.run().verdict
            except (ValueError, ArithmeticError, KeyError):  # the logarithm of a sign
                continue
        if verdict != honest:
            return what, verdict
    return "", honest


def is_experiment(claim: Claim) -> bool:
    return claim.id in published_results.EXPERIMENTS


def rows(chosen: list[Claim]) -> list[dict[str, Any]]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        spoil(Path(folder))
        for claim in chosen:
            start, honest = time.process_time(), claim.run().verdict
            what, verdict = (
                experiment_kills(claim, Path(folder))
                if is_experiment(claim)
                else kills(claim)
            )
            spent = time.process_time() - start
            row = {"claim": claim.id, "verdict": honest, "sabotaged": verdict}
            found.append({**row, "change": what, "seconds": spent})
    return found


def main() -> None:
    named = sys.argv[1] if len(sys.argv) > 1 else None
    found = rows(catalogue.select(claim=named))
    if named is not None:  # the other claims keep their rows
        again = {row["claim"] for row in found}
        known = json.loads((RESULTS / "claims_sabotage.json").read_text())["rows"]
        found += [row for row in known if row["claim"] not in again]
    stuck = [r["claim"] for r in found if r["verdict"] == r["sabotaged"]]
    publish("claims_sabotage", found, claims=len(found), cannot_change=stuck)


if __name__ == "__main__":
    main()
