"""What users may rely on: the names, the commands, and what importing costs."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import typer
from typer.main import get_command

import equipoise
from equipoise.cli import COMMANDS, application

ROOT = Path(__file__).parents[1]


def test_names() -> None:
    assert sorted(equipoise.__all__) == [
        "Audit",
        "Balance",
        "Estimate",
        "Finding",
        "Reading",
        "Run",
        "__version__",
        "audit",
        "balance",
        "open_run",
        "plan",
        "sensitivity",
        "show",
        "watch",
    ]
    assert dir(equipoise) == sorted(equipoise.__all__)


def test_commands() -> None:
    expected = [
        "audit",
        "board",
        "curvature",
        "demo",
        "doctor",
        "export",
        "live",
        "mcp",
        "plan",
        "precision",
        "preflight",
        "remedies",
        "remedy",
        "replay",
        "report",
        "rules",
        "run",
        "runs",
        "selection",
        "warmup",
    ]
    assert sorted(COMMANDS) == expected


def test_every_help_starts_without_torch() -> None:
    modules = ", ".join(f"equipoise.cli.{n.replace('-', '_')}" for n in COMMANDS)
    code = f"import sys, {modules}; assert not {{'torch', 'numba'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_help_has_an_example() -> None:
    """Add ``EXAMPLES`` to the command's file, or ``epilog=`` below an ``app``."""
    without = [
        command
        for name in COMMANDS
        for command, found in _leaves(f"equipoise {name}", get_command(_loaded(name)))
        if command not in f"{found.help} {found.epilog}".partition("Example")[2]
    ]
    assert not without


def _loaded(name: str) -> typer.Typer:
    """Return one command alone, under a root of its own."""
    return application([name])


def _leaves(path: str, root: click.Command) -> list[tuple[str, click.Command]]:
    """Return the command at a path, or what is below it where it has subcommands."""
    found = root.commands[path.split()[1]]  # type: ignore[attr-defined]
    below = getattr(found, "commands", None)
    if below is None:
        return [(path, found)]
    return [(f"{path} {name}", command) for name, command in below.items()]


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(equipoise, "wotch")


def test_importing_loads_no_heavy_package() -> None:
    code = (
        "import sys, equipoise; from equipoise import Finding, Reading; "
        "assert not {'torch', 'numba', 'numpy', 'sqlite3'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_function_is_not_shadowed_by_a_module() -> None:
    code = (
        "import equipoise; first = equipoise.open_run; "
        "import equipoise.store; assert equipoise.open_run is first"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def imported_by_tests() -> Iterator[str]:
    """Yield the first name of everything that the tests import."""
    for path in (ROOT / "conftest.py", *ROOT.glob("tests/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                yield node.module.partition(".")[0]
            elif isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)


def test_the_source_distribution_holds_what_its_tests_need() -> None:
    """Without ``benchmarks`` the tests of an unpacked sdist fail at collection."""
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]
    included = {*built["build"]["targets"]["sdist"]["include"]}
    ours = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"src"}
    links = re.findall(r"\]\(([\w./-]+)", (ROOT / "README.md").read_text("utf-8"))
    linked = {link.split("/")[0] for link in links if (ROOT / link).exists()}
    assert {"tests", "conftest.py", "src", "benchmarks", "docs"} <= included
    assert ours.intersection(imported_by_tests()) | linked <= included
