"""The command line: light to start, one clear line when something is wrong."""

import json
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
import typer

from equipoise import cli
from equipoise.errors import RunFileError, SilentSiteError
from tests.report.runs import failing_run, pre_and_post

COMMAND_FILES = Path(cli.__file__).parent
SHARED = {"__init__", "arguments", "study", "subject", "progress", "plugins"}
SHARED |= {"demo_models"}


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
    assert run(capsys, "--version")[:2] == (0, "equipoise 0.2.0\n")


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
    words = [["--help"], *([name, "--help"] for name in cli.COMMANDS)]
    out, err = without_extras(*words)
    assert err == f"{[0] * len(words)}\n"
    assert "what to keep in fp32" in out and "Hugging Face" in out
    assert out.count("Examples:") == len(words)


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
    assert "post-LN first parts from pre-LN at step 0" in out
    assert "first parts" not in run(capsys, "report", str(runs / "pre.eqp"))[1]
    both = run(
        capsys, "report", str(runs / "pre.eqp"), str(runs / "post.eqp"), "--json"
    )
    found = json.loads(both[1])["comparison"]
    assert found["baseline"] == "pre-LN" and found["quantities"] and "options" in found


@pytest.mark.parametrize("words", [("report",), ("runs",), ("report", "--html")])
def test_what_may_take_long_shows_that_it_works(
    runs: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    shown: list[str] = []

    @contextmanager
    def working(doing: str) -> Iterator[None]:
        shown.append(doing)
        yield
        shown.append("over")

    module = import_module(f"equipoise.cli.{words[0]}")
    monkeypatch.setattr(module, "working", working)
    page = [str(runs / "page.html")] if "--html" in words else []
    with pytest.raises(SystemExit) as left:
        cli.main([words[0], str(runs), *words[1:], *page])
    assert not left.value.code and shown == ["reading the runs", "over"]


def test_report_as_json_and_as_an_exit_code(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pre, post = str(runs / "pre.eqp"), str(runs / "long.eqp")
    failing_run(Path(post), steps=60)  # twelve samples: enough to be judged
    code, out, _ = run(capsys, "report", post, "--json", "--fail-on", "warn")
    verdict = json.loads(out)["verdict"]
    assert code == 6 and verdict["state"] == "at risk" and verdict["since"] == 0
    assert verdict["findings"][0]["code"] == "gradient.vanished"
    assert run(capsys, "report", pre, post, "--fail-on", "error")[0] == 0
    assert run(capsys, "report", pre, "--fail-on", "warn")[0] == 0
    assert run(capsys, "report", post, "--fail-on", "at risk")[0] == 6
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
    assert code == 0 and "pre-LN" in out and "post-LN" in out and "30" in out
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


@pytest.mark.parametrize(
    "line, expected",
    [
        ("equipoise pl", {"plan"}),
        ("equipoise plan --de", {"--depth", "--decoder-depth"}),
    ],
)
def test_a_shell_can_complete_commands_and_options(
    line: str,
    expected: set[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("_EQUIPOISE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    assert set(run(capsys)[1].split()) == expected


CONFIGS = {
    "llama": (
        '{"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, '
        '"num_attention_heads": 32, "rms_norm_eps": 1e-6, "torch_dtype": "float16"}',
        {
            "norm": "rmsnorm",
            "residual": "pre",
            "precision": "fp16",
            "feedforward": "gated",
        },
    ),
    "t5": (
        '{"model_type": "t5", "num_layers": 8, "d_model": 512, "num_heads": 8, '
        '"feed_forward_proj": "gated-gelu"}',
        {"depth": 8, "feedforward": "gated"},
    ),
    "bert": (
        '{"model_type": "bert", "num_hidden_layers": 12, "hidden_size": 768, '
        '"num_attention_heads": 12}',
        {"norm": "layernorm", "residual": "post", "feedforward": "plain"},
    ),
    "vision": (
        '{"model_type": "x", "vision_config": {"num_hidden_layers": 9}, '
        '"text_config": {"n_layer": 6, "n_embd": 64, "n_head": 4}}',
        {"depth": 6, "width": 64, "heads": 4},
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_plan_takes_a_model(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, expected = CONFIGS[name]
    (tmp_path / "config.json").write_text(text)
    for place in (tmp_path, tmp_path / "config.json"):
        code, out, _ = run(capsys, "plan", str(place), "--json")
        found = json.loads(out)["model"]
        assert code == 0 and expected.items() <= found.items()


def test_a_plan_takes_options_by_name_and_they_go_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(CONFIGS["llama"][0])
    out = run(capsys, "plan", str(tmp_path), "--depth", "8", "--json")[1]
    assert json.loads(out)["model"]["depth"] == 8
    named = ("--depth", "36", "--width", "1280", "--heads", "20")
    assert run(capsys, "plan", *named) == run(capsys, "plan", "36", "1280", "20")
    for words, line in (
        (["--depth", "3"], "--width, --heads: give a model"),
        (["3", "4"], "DEPTH WIDTH HEADS as three numbers"),
        ([str(tmp_path / "absent")], "no such file"),
        ([str(Path(__file__))], "not JSON"),
    ):
        code, _, err = run(capsys, "plan", *words)
        assert code == 2 and line in err and err.count("\n") == 1
    (tmp_path / "config.json").write_text('{"n_layer": 3}')
    assert "does not say the width" in run(capsys, "plan", str(tmp_path))[2]


def test_doctor_without_torch_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from equipoise.cli import doctor

    real = doctor.version

    def absent(name: str) -> str:
        if name in ("torch", "polars"):
            raise doctor.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(doctor, "version", absent)
    code, out, _ = run(capsys, "doctor")
    assert code == 0 and 'pip install "equipoise[export]"' in out
    assert "runs can be read, not written" in out
    found = json.loads(run(capsys, "doctor", "--json")[1])
    assert found["versions"]["torch"] is None and found["model"] is None


def test_json_without_a_file_is_printed_and_with_one_written(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, printed, _ = run(capsys, "runs", "--json", str(runs))
    names = {row["name"] for row in json.loads(printed)["runs"]}
    file = tmp_path / "runs.json"
    _, table, told = run(capsys, "runs", str(runs), "--json", str(file))
    assert "wrote" in told and "pre" in table
    written = json.loads(file.read_text())["runs"]
    assert names == {row["name"] for row in written} != set()
