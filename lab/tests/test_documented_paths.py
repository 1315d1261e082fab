"""Every dotted path that a document names imports, and every file is there."""

import ast
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
DOTTED = re.compile(r"\bequipoise(?:_lab)?(?:\.[A-Za-z_]\w*)+")
FENCE = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
# Names of ours that are no Python paths: an entry point's group, a configuration file.
NOT_PYTHON = {
    *(f"equipoise.{group}" for group in ("commands", "families", "rules", "subjects")),
    "equipoise.toml",
}


def imported(code: str) -> set[str]:
    """Return what a piece of code imports of ours, one dotted path per name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {path for path in found if path.startswith(("equipoise.", "equipoise_lab."))}


def named_in(text: str) -> set[str]:
    return set(DOTTED.findall(text)) | {
        path for code in FENCE.findall(text) for path in imported(code)
    }


def documented() -> set[str]:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "lab/README.md"]
    # The changelog tells the past: what it names may be gone.
    texts = [p.read_text(encoding="utf-8") for p in pages if p.name != "CHANGELOG.md"]
    found = {path for text in texts for path in named_in(text)}
    for example in ROOT.glob("**/examples/*.py"):
        found |= imported(example.read_text(encoding="utf-8"))
    return found - NOT_PYTHON


def resolved(path: str) -> object:
    """Import the longest module in a dotted path, then follow its attributes."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        try:
            module: ModuleType = import_module(name)
        except ModuleNotFoundError as missing:
            if missing.name != name:
                raise
            continue
        found: object = module
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(path)


@pytest.mark.parametrize("path", sorted(documented()))
def test_a_documented_path_imports(path: str) -> None:
    resolved(path)


FILE = re.compile(r"`((?:tests|benchmarks|docs|src|examples|lab)/[\w./-]+)`")


def missing_files(text: str) -> list[str]:
    return [name for name in FILE.findall(text) if not (ROOT / name).exists()]


def test_a_file_that_a_document_names_exists() -> None:
    """A reader is sent to tests as proof: seven had moved when this was written."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "lab/README.md"]
    texts = {p: p.read_text(encoding="utf-8") for p in pages}
    found = {p.name: missing_files(t) for p, t in texts.items()}
    del found["CHANGELOG.md"]
    assert {name: files for name, files in found.items() if files} == {}
    assert missing_files("`tests/no_such.py` and `docs/README.md`") == [
        "tests/no_such.py"
    ]
