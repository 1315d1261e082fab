"""The command line: light to start, one clear line when something is wrong."""

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import typer

from equipoise import cli
from equipoise.errors import RunFileError, SilentSiteError
from tests.report.runs import pre_and_post

COMMAND_FILES = Path(cli.__file__).parent
SHARED = {"__init__", "arguments", "subject", "lab_actions", "progress"}


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(list(words))
    said = capsys.readouterr()
    return int(left.value.code or 0), said.out, said.err


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    pre_and_post(tmp_path, steps=30)
    return tmp_path


def fake(monkeypatch: pytest.MonkeyPatch, **members: object) -> None:
    module = types.ModuleType("equipoise.cli.fake")
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, "equipoise.cli.fake", module)
    monkeypatch.setitem(cli.COMMANDS, "fake", "Pretend.")


def raising(error: Exception):
    def command() -> None:
        """Fail."""
        raise error

    return command


def test_every_command_is_a_file_and_every_file_a_command() -> None:
    files = {p.stem for p in COMMAND_FILES.glob("*.py")} - SHARED
    assert {name.replace("-", "_") for name in cli.COMMANDS} == files


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0 and all(name in out for name in cli.COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version")[:2] == (0, "equipoise 0.1.0\n")


WITHOUT_EXTRAS = """
import sys
class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "numba", "safetensors", "scipy"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refusing())
from equipoise.cli import main
codes = []
for words in WORDS:
    try: main(words)
    except SystemExit as left: codes.append(left.code or 0)
print(codes, file=sys.stderr)
"""


def without_extras(*words: list[str]) -> tuple[str, str]:
    """Return what commands print, and their exit codes, in a torch-free interpreter."""
    code = WITHOUT_EXTRAS.replace("WORDS", repr(words))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.stdout, done.stderr


def test_every_help_works_without_torch() -> None:
    lab = [["lab", name, "--help"] for name in ("list", "run", "report", "theorem")]
    words = [["--help"], *([name, "--help"] for name in cli.COMMANDS), *lab]
    out, err = without_extras(*words)
    assert err == f"{[0] * len(words)}\n"
    assert "what to keep in fp32" in out and "Hugging Face" in out


def test_reports_work_and_audits_name_the_extra_without_torch(runs: Path) -> None:
    out, err = without_extras(
        ["report", str(runs / "pre.eqp")], ["precision", "m.py:f"]
    )
    assert "pre-LN: not judged: 6 sampled steps" in out
    assert 'pip install "equipoise[torch]"' in err and err.endswith("[0, 5]\n")


def test_python_dash_m() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "equipoise", "--version"], capture_output=True, text=True
    )
    assert done.stdout.startswith("equipoise ")


def test_report_on_the_terminal(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "report", str(runs / "pre.eqp"), str(runs / "post.eqp"))
    assert code == 0
    assert "pre-LN: not judged: 6 sampled steps" in out and "÷" in out


def test_report_as_json_and_as_an_exit_code(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pre, post = str(runs / "pre.eqp"), str(runs / "post.eqp")
    code, out, _ = run(capsys, "report", post, "--json", "--fail-on", "warn")
    verdict = json.loads(out)["verdict"]
    assert code == 6 and verdict["state"] == "at risk" and verdict["since"] == 0
    assert verdict["findings"][0]["rule"] == "gradient.vanished"
    assert run(capsys, "report", pre, post, "--fail-on", "error")[0] == 0
    assert run(capsys, "report", pre, "--fail-on", "warn")[0] == 0
    assert run(capsys, "report", pre, "--fail-on", "not-judged")[0] == 6
    code, _, err = run(capsys, "report", pre, "--fail-on", "bad")
    assert code == 2 and "at-risk" in err


def test_report_of_the_newest(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EQUIPOISE_RUNS", str(runs))
    assert "post-LN" in run(capsys, "report")[1]
    monkeypatch.setenv("EQUIPOISE_RUNS", str(runs / "absent"))
    code, _, err = run(capsys, "report")
    assert code == RunFileError.exit_code and err.count("\n") == 1


def test_report_as_a_page(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = runs / "r.html"
    code, out, _ = run(capsys, "report", str(runs / "pre.eqp"), "--html", str(page))
    assert code == 0 and "r.html" in out and "pre-LN" in page.read_text("utf-8")


def test_runs_are_listed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "torn.eqp").write_text("x" * 2000)
    code, out, _ = run(capsys, "runs", str(runs))
    assert code == 0 and "pre-LN" in out and "post-LN" in out and "29" in out
    assert "cannot be" in out
    assert run(capsys, "runs", str(runs / "absent"))[0] == RunFileError.exit_code


def test_our_errors_are_one_line_and_their_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, command=raising(SilentSiteError("h.3 said nothing")))
    code, out, err = run(capsys, "fake")
    assert (code, out, err) == (4, "", "equipoise: h.3 said nothing\n")


def test_a_missing_extra_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = ModuleNotFoundError("No module named 'torch'", name="torch.nn")
    fake(monkeypatch, command=raising(error))
    code, _, err = run(capsys, "fake")
    assert code == 5 and 'pip install "equipoise[torch]"' in err
    fake(
        monkeypatch,
        command=raising(ModuleNotFoundError("No module named 'x'", name="x")),
    )
    assert run(capsys, "fake")[0] == cli.DEFECT


def test_a_defect_says_how_to_see_more(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, command=raising(KeyError("oops")))
    code, _, err = run(capsys, "fake")
    assert code == cli.DEFECT and "EQUIPOISE_TRACEBACK=1" in err and "oops" in err
    monkeypatch.setenv("EQUIPOISE_TRACEBACK", "1")
    with pytest.raises(KeyError):
        cli.main(["fake"])


def test_an_interruption_is_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loading(given: list[str]) -> typer.Typer:
        raise KeyboardInterrupt

    fake(monkeypatch, command=raising(KeyboardInterrupt()))  # type: ignore[arg-type]
    assert run(capsys, "fake")[0] == cli.INTERRUPTED
    monkeypatch.setattr(cli, "application", loading)
    assert run(capsys, "fake") == (cli.INTERRUPTED, "", "")


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "nope")[0] == 2
    assert run(capsys, "report", "--nope")[0] == 2


def test_a_command_may_have_subcommands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = typer.Typer()
    app.command("one")(lambda: typer.echo("first"))
    app.command("two")(lambda: typer.echo("second"))
    fake(monkeypatch, app=app)
    assert run(capsys, "fake", "two") == (0, "second\n", "")


def test_a_command_may_hand_on_unknown_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(context: typer.Context) -> None:
        """Echo."""
        typer.echo(" ".join(context.args))

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    fake(monkeypatch, command=command, CONTEXT=settings)
    assert run(capsys, "fake", "train.py", "--lr", "3")[1] == "train.py --lr 3\n"
