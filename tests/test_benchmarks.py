"""What ``./dev bench`` lists can be run, and nothing else is listed."""

from pathlib import Path

import pytest

from benchmarks import accelerator
from benchmarks.__main__ import main, modules
from benchmarks.house_counts import code_lines, counts, cycles, imports
from benchmarks.unused_names import unpassed, unused_names, uses


def test_only_what_can_be_run_is_listed() -> None:
    found = modules()
    assert found["balance_speed"] == "benchmarks.balance_speed"
    assert found["lipschitz"] == "lab.benchmarks.lipschitz"
    assert not {"__main__", "paired", "results", "table"} & set(found)


def test_a_misspelt_name_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["balanse"]) == 2 and "balance_speed" in capsys.readouterr().out


def test_without_a_gpu_the_accelerators_benchmark_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    accelerator.main()
    (line,) = capsys.readouterr().out.splitlines()
    assert "no CUDA or ROCm device here" in line


def test_what_it_measures_on_a_gpu_runs_here() -> None:
    """Two lengths and a few steps; a step that waited would be named."""
    rows = [
        *accelerator.agreement("cpu", accelerator.CPU),
        *accelerator.kernels("cpu", accelerator.CPU),
        *accelerator.waits("cpu", accelerator.CPU),
    ]
    assert [row["missed"] for row in rows if "missed" in row] == [0, 0]
    assert [row["found"] for row in rows if "found" in row] == ["nothing"] * 3
    assert all(row["all rows"] > 0 for row in rows if "all rows" in row)


def test_docstrings_comments_and_blank_lines_are_not_code() -> None:
    source = '"""One\ntwo."""\n\n# why\nx = [\n    1,  # one\n]\n"""Of x."""\ny = "z"\n'
    assert code_lines(source) == 4


def test_cycles_see_imports_inside_functions_but_not_those_that_never_run() -> None:
    typed = "if TYPE_CHECKING:\n    from p import a\n"
    lazy = "def f():\n    from p import b\n"
    assert cycles(imports({"p.a": "import p.b\n", "p.b": typed})) == []
    found = cycles(imports({"p.a": lazy, "p.b": "from p import c\nimport p.a\n"}))
    assert found == [["p.a", "p.b"]]


def test_a_module_imported_once_is_a_one_caller_module() -> None:
    tree = {"p.a": "import p.b\nimport p.c\n", "p.b": "import p.c\n", "p.c": "x = 1\n"}
    found = counts(tree)
    assert found["one-caller modules"] == 1 and found["files"] == 3
    assert found["lines"] == 4 and found["files over 400 lines"] == 0


def test_unused_names_and_parameters_are_listed(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "src" / "a.py").write_text(
        "USED = 1\nDEAD = USED\n"
        "def called(x, y=1, *, z=2, named=3): return x\n"
        "def callback(x=1): return x\n"
        "class Box:\n    def read(self): ...\n    def left(self): ...\n"
    )
    (tmp_path / "tests" / "b.py").write_text(
        "from a import called, callback, Box\ncalled(1, 2, named=3)\nBox().read()\n"
        "callback(); print(callback)\n"
    )
    found = uses(tmp_path)
    assert unused_names(found, tmp_path) == ["src/a.py:2 DEAD", "src/a.py:7 left"]
    assert unpassed(found, tmp_path) == ["src/a.py:3 called(z)"]
