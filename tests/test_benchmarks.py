"""What ``./dev bench`` lists can be run."""

import ast
from pathlib import Path

import pytest

import benchmarks
from benchmarks.__main__ import main, names


@pytest.mark.parametrize("name", names())
def test_every_listed_benchmark_has_a_main(name: str) -> None:
    home = Path(benchmarks.__path__[0])
    file = next(
        p for p in (home / f"{name}.py", home / name / "__init__.py") if p.exists()
    )
    functions = [n for n in ast.parse(file.read_text()).body if hasattr(n, "args")]
    assert "main" in [function.name for function in functions]


def test_a_misspelt_name_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["balanse"]) == 2 and "balance_speed" in capsys.readouterr().out
