"""How large the source tree is, and how tangled: counts now, and at a git revision.

``./dev bench house_counts``, or ``python -m benchmarks.house_counts REVISION``. Code
lines hold a token that is neither a comment nor part of a docstring. A one-caller
module is imported by exactly one other module of the package. A cycle counts imports
inside functions too; what stands under ``if TYPE_CHECKING`` never runs and does not.

At equal features, files that serve only what the older tree could not do are left out
(``NEW``). What features added inside older files is still counted, so the comparison is
against us.
"""

import ast
import io
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks.table import publish

REVISION = "dc3c61d"
"""The last commit before the tree was redrawn."""
ROOT = Path(__file__).parents[1]
PACKAGE = "src/equipoise"
LONGEST = 400
EQUAL = ("files", "code lines")
Tree = dict[str, str]
"""Dotted module → its source."""
NEW = {
    "verdicts and forecast": "forecast.causes forecast.features forecast.history "
    "forecast.remedy_catalogue forecast.rules* forecast.score forecast.start_rules "
    "forecast.verdict forecast.weight_rules forecast.wording cli.rules",
    "remedies and autopilot": "autopilot* remedies.attention_hooks remedies.catalogue "
    "remedies.gradients remedies.losses remedies.optimiser remedies.precision "
    "remedies.qk_clip remedies.residual remedies.roll_back remedies.scores "
    "remedies.sigma_reparam remedies.weights "
    "watching.autopilot_bridge anatomy.random_state cli.remedies cli.remedy",
    "audit, pre-flight, doctor": "auditing.weights* auditing.audit auditing.page "
    "auditing.preflight auditing.doctor cli.audit cli.preflight cli.doctor",
    "storms": "lab.storms* cli.storms",
    "board, live, comparison": "web* cli.board cli.live cli.progress report.assets "
    "report.changes report.comparison report.live report.live_screen report.notebook "
    "report.page_model report.quantities",
    "export and checksums": "store.tables store.checksums store.retrying cli.export",
    "claims as a command": "claims.catalogue claims.page claims.emadi_depth "
    "claims.emadi_layers claims.exact* claims.measured_results claims.petrov_formulas "
    "claims.published_results claims.search cli.claims lab.studies.sizes",
    "others": "_moved anatomy.fused_kernels numerics.rows.triton_* "
    "planning.config planning.evidence probes.row_sample sinks.webhook "
    "watching.warmup cli.warmup",
}
"""What the older tree could not do → the modules that serve only that."""
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def working_tree(root: Path = ROOT) -> Tree:
    """Return the package as it is on disk."""
    files = sorted((root / PACKAGE).rglob("*.py"))
    return {_module(str(f.relative_to(root))): f.read_text("utf-8") for f in files}


def tree_at(revision: str, root: Path = ROOT) -> Tree:
    """Return the package as it was at a git revision."""
    command = ["git", "archive", "--format=tar", revision, PACKAGE]
    packed = subprocess.run(command, cwd=root, check=True, capture_output=True).stdout
    found = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is not None and member.name.endswith(".py"):
                found[_module(member.name)] = file.read().decode()
    return found


def _module(path: str) -> str:
    parts = Path(path).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def code_lines(source: str) -> int:
    """Return how many lines hold code.

    >>> code_lines('"Doc."\\n\\n# why\\nx = [\\n    1,  # one\\n]\\n')
    3
    """
    strings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                strings |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            found |= set(range(token.start[0], token.end[0] + 1))
    return len(found - strings)


def imports(tree: Tree) -> dict[str, set[str]]:
    """Return which modules of the tree each module imports, in functions too."""
    return {
        name: _imported(ast.parse(source), set(tree)) - {name}
        for name, source in tree.items()
    }


def _imported(node: ast.AST, known: set[str]) -> set[str]:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return set()
    found: set[str] = set()
    if isinstance(node, ast.Import):
        found = {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
        inside = {f"{node.module}.{alias.name}" for alias in node.names}
        # `from package import module` needs the module, not the package's names.
        found = inside if inside <= known else inside | {node.module or ""}
    for child in ast.iter_child_nodes(node):
        found |= _imported(child, known)
    return found & known


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that reach each other.

    >>> cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}})
    [['b', 'c']]
    """
    reach = {name: _reached(name, graph) for name in graph}
    groups = {
        tuple(sorted(m for m in reach[name] if name in reach[m]))
        for name in graph
        if name in reach[name]
    }
    return sorted(map(list, groups))


def _reached(start: str, graph: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    ahead = list(graph[start])
    while ahead:
        if (name := ahead.pop()) not in seen:
            seen.add(name)
            ahead.extend(graph[name])
    return seen


def counts(tree: Tree) -> dict[str, float]:
    """Return every count of one tree."""
    graph = imports(tree)
    callers = Counter(name for found in graph.values() for name in found)
    lines = {name: len(source.splitlines()) for name, source in tree.items()}
    total = sum(lines.values())
    return {
        "files": len(tree),
        "lines": total,
        "code lines": sum(map(code_lines, tree.values())),
        "files per thousand lines": round(1000 * len(tree) / total, 2),
        "one-caller modules": sum(callers[name] == 1 for name in tree),
        "import cycles": len(cycles(graph)),
        f"files over {LONGEST} lines": sum(n > LONGEST for n in lines.values()),
    }


def at_equal_features(tree: Tree) -> Tree:
    """Return the modules that serve what the older tree could do too.

    >>> list(at_equal_features({"equipoise.web.app": "", "equipoise.store.lock": ""}))
    ['equipoise.store.lock']
    """
    patterns = [f"equipoise.{p}" for given in NEW.values() for p in given.split()]
    return {
        name: source
        for name, source in tree.items()
        if not any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def packages(tree: Tree) -> list[dict[str, object]]:
    """Return files and code lines of each package."""
    found: dict[str, Tree] = {}
    for name, source in tree.items():
        package = (name.split(".") + ["(top)"])[1]
        found.setdefault(package, {})[name] = source
    return [
        {
            "package": package,
            "files": len(part),
            "lines": sum(len(source.splitlines()) for source in part.values()),
            "code lines": sum(map(code_lines, part.values())),
        }
        for package, part in sorted(found.items())
    ]


def main(revision: str = REVISION) -> None:
    now = working_tree()
    before, after = counts(tree_at(revision)), counts(now)
    same = at_equal_features(now)
    before |= {f"{name} at equal features": before[name] for name in EQUAL}
    after["files at equal features"] = len(same)
    after["code lines at equal features"] = sum(map(code_lines, same.values()))
    rows = [
        {
            "count": name,
            revision: before[name],
            "now": after[name],
            "change": f"{after[name] / before[name] - 1:+.1%}" if before[name] else "",
        }
        for name in after
    ]
    loops = cycles(imports(now))
    publish("house_counts", rows, packages=packages(now), cycles=loops)
    for loop in loops:
        print("cycle:", ", ".join(loop))


if __name__ == "__main__":
    main(*sys.argv[1:2])
