"""The tree is the architecture: each layer may import only the layers named here."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "equipoise"

# "" is equipoise/__init__.py: the public surface, from which only __version__ is taken.
MAY_IMPORT = {
    # integrations.registration loads nothing: it enters names into others' tables.
    "": "records errors integrations",
    "records": "errors",
    "errors": "",
    "numerics": "errors records",
    "theory": "errors numerics",
    "anatomy": "errors",
    "text": "errors records judging",
    "store": "errors records judging text",
    "judging": "errors records",
    "sinks": "errors records",
    # Only the probes of the preset `deep` import theory; `default` imports none of it.
    "probes": "errors numerics theory anatomy",
    "remedies": "errors numerics anatomy",
    "planning": "errors records numerics",
    "autopilot": "errors records anatomy judging remedies text",
    "watching": "errors records numerics anatomy probes judging text store sinks "
    "autopilot",
    "auditing": "errors records numerics theory anatomy probes report watching "
    "planning integrations judging store text",
    "integrations": "errors records watching store",
    "report": "errors records store judging text",
    "web": "errors records store report text",
    "mcp": "errors records store judging report web",
    "cli": "errors records mcp store watching planning integrations report web "
    "auditing judging sinks text",
}
TORCH_FREE = {
    "",
    "records",
    "errors",
    "text",
    "store",
    "judging",
    "sinks",
    "report",
    "web",
    "mcp",
}
# Typing `equipoise report` on a laptop must not need torch either.
TORCH_FREE_MODULES = {"equipoise.cli", "equipoise.planning"}


def layer(path: Path) -> str:
    first = path.relative_to(SRC).with_suffix("").parts[0]
    return {"__init__": "", "__main__": "cli"}.get(first, first)


def module(path: Path) -> str:
    parts = path.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = sorted(SRC.rglob("*.py"))
KNOWN = {module(path) for path in MODULES}


def runtime_nodes(tree: ast.AST) -> list[ast.AST]:
    """Return every node but those under ``if TYPE_CHECKING``, which never runs."""
    if isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.dump(tree.test):
        return []
    children = [n for child in ast.iter_child_nodes(tree) for n in runtime_nodes(child)]
    return [tree, *children]


def imports(nodes: list[ast.AST], path: Path) -> set[str]:
    names = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            # `from package import module` needs the module, not the package's names.
            names |= inside if inside <= KNOWN else inside | {node.module or ""}
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return names


by_path = pytest.mark.parametrize(
    "path", MODULES, ids=lambda p: str(p.relative_to(SRC))
)


@by_path
def test_imports_point_down(path: Path) -> None:
    here = layer(path)
    assert here in MAY_IMPORT, f"{here} is not a layer: add it to MAY_IMPORT"
    layers = {layer(p) for p in MODULES}
    found = imports(runtime_nodes(ast.parse(path.read_text())), path)
    inside = {n.split(".")[1] for n in found if n.startswith("equipoise.")} & layers
    assert inside <= {here, *MAY_IMPORT[here].split()}


def test_no_import_cycle() -> None:
    """Imports inside functions count: a cycle that starts late is still one."""
    graph = {}
    for path in MODULES:
        found = imports(runtime_nodes(ast.parse(path.read_text())), path) & KNOWN
        graph[module(path)] = found - {module(path), "equipoise"}
    TopologicalSorter(graph).prepare()


HERE = sorted({layer(p) for p in MODULES} & TORCH_FREE)
STARTS = [f"equipoise.{name}".rstrip(".") for name in HERE] + sorted(
    name for name in TORCH_FREE_MODULES if name in {module(p) for p in MODULES}
)


@pytest.mark.parametrize("name", STARTS)
def test_reading_side_starts_without_torch(name: str) -> None:
    code = f"import sys, {name}; assert not {{'torch', 'numba'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=SRC.parent)


ONLY_HERE = SRC / "cli" / "plugins.py"
"""How to install the laboratory is said here, and nothing else of it anywhere."""


@by_path
def test_the_instrument_does_not_name_the_laboratory(path: Path) -> None:
    named = re.findall(r"equipoise[-_]lab", path.read_text(encoding="utf-8"))
    assert len(named) == (path == ONLY_HERE)


def test_the_tests_of_the_instrument_do_not_need_the_laboratory() -> None:
    """They run from an unpacked source distribution, where it is not installed."""
    for path in SRC.parents[1].glob("tests/**/*.py"):
        found = imports([*ast.walk(ast.parse(path.read_text("utf-8")))], path)
        assert not {n for n in found if n.partition(".")[0] in {"equipoise_lab", "lab"}}


SAME_BY_DESIGN = {"EquipoiseCallback"}
"""One for each framework: its user imports one of them."""


def test_no_two_public_classes_have_one_name() -> None:
    """A search for a class finds its definition, not a choice."""
    found: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(module(path))
    twice = {name: places for name, places in found.items() if len(places) > 1}
    assert twice.keys() == SAME_BY_DESIGN, twice
