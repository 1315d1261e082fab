"""Public names that nothing uses, and defaulted parameters that nobody passes.

``python -m benchmarks.unused_names``. A name is used where its module reads it, another
file imports it, something has it as an attribute, or a page names it. A method counts
as used where any attribute of that name is read; one that overrides a method of another
package is left out. A parameter is passed where any call of a function of that name
gives it, by keyword, by position or by ``**``; a function that is itself passed on as a
value may be called with anything, and is left out.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
USERS = ("src", "lab", "tests", "benchmarks", "docs", "examples")
WORD = re.compile(r"\w+")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(slots=True)
class Uses:
    """What the repository reads, imports and calls."""

    names: Counter[tuple[Path, str]] = field(default_factory=Counter)
    """A file and a name that it reads."""
    words: Counter[str] = field(default_factory=Counter)
    """Imported names, attributes, words of short strings and of pages."""
    calls: dict[str, list[ast.Call]] = field(default_factory=dict)
    values: set[str] = field(default_factory=set)
    """Names that are read without being called."""

    def add(self, path: Path, tree: ast.AST) -> None:
        nodes = list(ast.walk(tree))
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        for call in calls:
            self.calls.setdefault(_called(call), []).append(call)
        called = {id(call.func) for call in calls}
        for node in nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self.names[path, node.id] += 1
                if id(node) not in called:
                    self.values.add(node.id)
            else:
                self.words.update(_words(node))


def _words(node: ast.AST) -> list[str]:
    """Return the names that a node refers to without reading a variable."""
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.alias):
        return [node.name.rpartition(".")[2]]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return WORD.findall(node.value) if len(node.value) < 60 else []
    return []


def _called(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def uses(root: Path = ROOT) -> Uses:
    """Return what every Python file and page of the repository uses."""
    found = Uses()
    for path in (file for part in USERS for file in (root / part).rglob("*.py")):
        found.add(path, ast.parse(path.read_text("utf-8")))
    pages = [*root.glob("*.md"), *root.glob("docs/**/*.md"), root / "pyproject.toml"]
    for page in pages:
        found.words.update(WORD.findall(page.read_text("utf-8")))
    return found


def definitions(tree: ast.Module) -> Iterator[tuple[str, ast.stmt, bool]]:
    """Yield public names, where they are defined, and whether they are methods."""
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef) and not node.decorator_list:
            yield node.name, node, False
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node, False
        if isinstance(node, ast.ClassDef) and not node.bases:
            yield from ((m.name, m, True) for m in node.body if isinstance(m, Function))


def unused_names(found: Uses, root: Path = ROOT) -> list[str]:
    """Return public names that nothing uses, as ``file:line name``."""
    unused = []
    for path in sorted((root / "src").rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        for name, node, is_method in definitions(tree):
            read = found.words[name] + (0 if is_method else found.names[path, name])
            if not name.startswith("_") and not read:
                unused.append(f"{path.relative_to(root)}:{node.lineno} {name}")
    return unused


def unpassed(found: Uses, root: Path = ROOT) -> list[str]:
    """Return defaulted parameters that no call gives, as ``file:line f(parameter)``."""
    unused = []
    for path in sorted((root / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, Function) and _is_ours(node, found):
                calls = found.calls.get(node.name, [])
                for place, name in _defaulted(node):
                    if calls and not any(_gives(call, place, name) for call in calls):
                        where = f"{path.relative_to(root)}:{node.lineno}"
                        unused.append(f"{where} {node.name}({name})")
    return unused


def _is_ours(node: Function, found: Uses) -> bool:
    """Say whether it is called by its name only: commands and callbacks are not."""
    special = node.decorator_list or node.name.startswith("__")
    return not special and node.name not in found.values


def _defaulted(node: Function) -> Iterator[tuple[int | None, str]]:
    """Yield each parameter with a default, and its place where it has one."""
    given = node.args
    places = [*given.posonlyargs, *given.args]
    is_method = bool(places) and places[0].arg in ("self", "cls")
    first = len(places) - len(given.defaults)
    for place, parameter in enumerate(places[first:], first - is_method):
        yield place, parameter.arg
    for parameter, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        if default is not None:
            yield None, parameter.arg


def _gives(call: ast.Call, place: int | None, name: str) -> bool:
    if any(keyword.arg in (None, name) for keyword in call.keywords):
        return True
    starred = any(isinstance(given, ast.Starred) for given in call.args)
    return starred or (place is not None and len(call.args) > place)


def main() -> None:
    found = uses()
    for title, rows in (
        ("public names that nothing uses", unused_names(found)),
        ("defaulted parameters that no call gives", unpassed(found)),
    ):
        print(f"{title}: {len(rows)}")
        print("".join(f"  {row}\n" for row in rows), end="")


if __name__ == "__main__":
    main()
