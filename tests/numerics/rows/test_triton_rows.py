"""The fused kernel: certified on every kind of call, in the interpreter or on a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEVICES
from tests.numerics.rows.kernel_cases import CASES

pytestmark = pytest.mark.needs("triton")
ROOT = Path(__file__).parents[3]


def in_triton(*args: str, interpret: bool) -> str:
    """Return what a program prints that may import triton."""
    paths = [str(ROOT / "src"), str(ROOT), str(Path(sys.prefix) / "triton")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    variables["TRITON_INTERPRET"] = str(int(interpret))
    variables["PYTHONWARNINGS"] = "ignore"
    done = subprocess.run(
        [sys.executable, *args], capture_output=True, env=variables, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module", params=DEVICES)
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    device, items = request.param, request.session.items
    given = [getattr(item, "callspec", None) for item in items]
    cases = [spec.params.get("case") for spec in given if spec]
    asked = [name for name in CASES if name in cases]
    program = "tests.numerics.rows.kernel_cases"
    printed = in_triton("-m", program, device, *asked, interpret=device == "cpu")
    return dict(json.loads(printed.splitlines()[-1]))


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_reads_what_the_definition_says(
    case: str, found: dict[str, Any]
) -> None:
    """No interval misses the truth; other columns are off by float32's rounding."""
    read = found[case]
    assert read["rows"] > 0
    assert read["missed"] == read["torch missed"] == 0
    assert read["error"] <= 4e-6
    assert read["broken"] and read["dark"]


def test_lower_is_that_of_the_cpu(found: dict[str, Any]) -> None:
    """Soft-capped scores are rounded; all others are the same numbers."""
    same = [read for name, read in found.items() if CASES[name].exact]
    rows = sum(read["rows"] for read in same)
    assert sum(read["off"] for read in same) <= 0.01 * rows
    assert sum(read["wide"] for read in found.values()) <= 0.01 * rows


def test_it_compiles_for_a_gpu_that_is_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For an A100; ``./dev bench kernel_compiled`` compiles for others too."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    printed = in_triton("-m", "benchmarks.kernel_compiled", "cuda:80", interpret=False)
    assert json.loads(printed.splitlines()[-1])["bytes"] > 10_000
