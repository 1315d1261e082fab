"""What users may rely on: the names, the commands, and what importing costs."""

import subprocess
import sys

import equipoise
from equipoise.cli import COMMANDS


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
        "watch",
    ]
    assert dir(equipoise) == sorted(equipoise.__all__)


def test_commands() -> None:
    expected = [
        "audit",
        "board",
        "claims",
        "curvature",
        "demo",
        "export",
        "lab",
        "plan",
        "precision",
        "preflight",
        "replay",
        "report",
        "rules",
        "run",
        "runs",
        "selection",
        "storms",
    ]
    assert sorted(COMMANDS) == expected


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(equipoise, "wotch")


def test_importing_is_light() -> None:
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
