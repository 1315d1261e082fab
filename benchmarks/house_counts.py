"""How large the source tree is, how tangled, and how it stands to its bars.

``./dev bench house_counts``, or ``python -m benchmarks.house_counts REVISION`` for a
comparison. Code lines hold a token that is neither a comment nor part of a docstring. A
one-caller module is imported by exactly one other module of the package. A cycle counts
imports inside functions too; what stands under ``if TYPE_CHECKING`` never runs and does
not.
"""

import ast
import io
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks.table import publish

ROOT = Path(__file__).parents[1]
PACKAGE = "src/equipoise"
LONGEST = 400
Tree = dict[str, str]
"""Dotted module → its source."""
APART = (
    "anatomy.mixers anatomy.recurrent judging.card judging.checks* judging.facts "
    "judging.statements mcp* probes.facts probes.loop_events probes.mixers "
    "store.object* text.card *metrics* watching.facts* watching.loop.loss_* "
    "watching.step.layers"
).split()
"""Checks and card, mixers, agents, metrics and object stores: a bar of their own."""
WATCHING_APART = ["watching.loop*", "watching.facts*", "watching.step.layers"]
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


def lines_of(tree: Tree, patterns: Sequence[str]) -> int:
    """Return the code lines of the modules that a pattern names.

    >>> lines_of({"equipoise.web.app": "x = 1", "equipoise.store.lock": ""}, ["web*"])
    1
    """
    return sum(
        code_lines(source)
        for name, source in tree.items()
        if any(fnmatchcase(name, f"equipoise.{pattern}") for pattern in patterns)
    )


def booleans(source: str) -> int:
    """Return how many attributes of self or of a class are set to True or False.

    >>> booleans("class A:\\n    a: bool = False\\n    b = 1\\n")
    1
    """
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ClassDef)]
    given = [n for node in nodes for n in ast.walk(node) if _is_kept(n)]
    values = (n.value for n in given if isinstance(n, ast.Assign | ast.AnnAssign))
    return sum(isinstance(v, ast.Constant) and type(v.value) is bool for v in values)


def _is_kept(node: ast.AST) -> bool:
    """Tell whether a statement assigns a field of a class, or of self."""
    if isinstance(node, ast.AnnAssign):
        return True
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(target, ast.Attribute) for target in targets)


def loaded(code: str) -> int:
    """Return how many modules of ours a new interpreter holds after some code."""
    ours = "len([name for name in sys.modules if name.startswith('equipoise.')])"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint({ours})"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return int(done.stdout.splitlines()[-1])


AUDIT = """
from torch import nn
from equipoise.auditing.audit import audit
audit(nn.TransformerEncoderLayer(32, 4, 64).state_dict())
"""


def bars(tree: Tree) -> list[dict[str, object]]:
    """Return each bar of the house that is counted here, and what it is now."""
    total, apart = lines_of(tree, ["*"]), lines_of(tree, APART)
    watching = lines_of(tree, ["watching*"]) - lines_of(tree, WATCHING_APART)
    handle = booleans(tree["equipoise.watching.handle"])
    importing = loaded("import equipoise.watching")
    found = [
        ("instrument, code lines, what stands apart left out", total - apart, 36_000),
        ("what stands apart, code lines", apart, 5_000),
        ("watching without loop/, facts and mixers, code lines", watching, 2_300),
        ("booleans of the handle", handle, 2),
        ("modules after import equipoise.watching", importing, 60),
        ("modules after an audit of weights", loaded(AUDIT), 30),
    ]
    return [{"bar": bar, "now": now, "at most": most} for bar, now, most in found]


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


def main(revision: str | None = None) -> None:
    """Print the bars, and every count now and at a revision."""
    now = working_tree()
    after = counts(now)
    rows: list[dict[str, object]] = [{"count": n, "now": after[n]} for n in after]
    if revision is not None:
        before = counts(tree_at(revision))
        rows = [{**row, revision: before[str(row["count"])]} for row in rows]
    loops = cycles(imports(now))
    publish("house_counts", rows, packages=packages(now), cycles=loops)
    publish("house_bars", bars(now))
    for loop in loops:
        print("cycle:", ", ".join(loop))


if __name__ == "__main__":
    main(*sys.argv[1:2])
