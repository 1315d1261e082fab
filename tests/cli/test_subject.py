"""Commands about one model: bad input of every kind is one line, and costs nothing."""

import json
from pathlib import Path

import pytest
import torch

from equipoise import cli
from equipoise.cli.subject import in_one_line
from equipoise.errors import InputError
from tests.cli.test_cli import run

MODELS = """
import torch
from torch import nn
from tests.models import GPT, GPTConfig
def gpt():
    return GPT(GPTConfig(width=8, depth=1, heads=1, context=16))
def pair():
    return gpt(), torch.zeros(1, 16, dtype=torch.long)
def with_targets():
    tokens = torch.zeros(1, 16, dtype=torch.long)
    return gpt(), (tokens, tokens)
def misfit():
    return nn.Linear(4, 4), torch.zeros(3, 5)
def hidden():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(8, 4)
        def forward(self, tokens):
            return {"last_hidden_state": self.embedding(tokens)}
    return Encoder()
def raises():
    raise RuntimeError("no weights here\\nand a second line")
"""
OWN_MODEL = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.maps = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    def forward(self, tokens):
        x = self.embedding(tokens)
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in self.maps)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + y.transpose(1, 2).flatten(2))
def pair():
    torch.manual_seed(0)
    return Model(), torch.randint(0, 16, (2, 12))
"""
COMMANDS = ("curvature", "precision", "selection")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(MODELS)
    (tmp_path / "torn.py").write_text("def f(:")
    (tmp_path / "torn.pt").write_bytes(b"torn")
    (tmp_path / "other.json").write_text('{"pixels": [[1.0, 2.0]], "more": [1]}')
    (tmp_path / "bare").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("nothing",), "cannot find a model called 'nothing'"),
        (("mine.py:raises",), "mine.py:raises: RuntimeError: no weights here"),
        (("torn.py:f",), "SyntaxError"),
        (("bare",), "no config.json"),
        (("mine.py:misfit",), "on this batch: RuntimeError: mat1 and mat2"),
        (("mine.py:gpt", "--batch", "torn.pt"), "not a whole file of tensors"),
        (("mine.py:gpt", "--batch", "other.json"), "pixels"),
        (("mine.py:pair", "--html", "."), "is a folder"),
        (("mine.py:pair", "--html", "mine.py"), "it was not overwritten"),
        (("mine.py:pair", "--html", "mine.py/page.html"), "nothing can be written"),
    ],
)
def test_one_line_is_printed_and_no_file_is_changed(
    command: str,
    words: tuple[str, ...],
    says: str,
    place: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*.py")}
    code, out, err = run(capsys, command, *words)
    assert code == InputError.exit_code and out == ""
    assert says in err and err.startswith("equipoise: ") and err.count("\n") == 1
    assert before == {path: path.stat().st_mtime_ns for path in place.rglob("*.py")}
    assert not list(place.rglob("*.html"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("curvature", "mine.py:hidden", "--random-tokens"),
            "returns its loss (FILE.py:FUNCTION",
        ),
        (("curvature", "mine.py:pair", "--lr", "0"), "a learning rate is positive"),
        (("curvature", "mine.py:pair", "--lr", "nan"), "a learning rate is positive"),
        (("curvature", "mine.py:pair", "--optimizer", "torn.pt"), "is not the state"),
        (("precision", "mine.py:pair", "--format", "fp9"), "unknown format 'fp9'"),
        (("selection", "mine.py:gpt"), "give one with --batch FILE (torch.save({"),
        (("precision", "mine.py:gpt"), "--random-tokens runs it on noise"),
        (("curvature", "mine.py:gpt"), "or --text FILE"),
        (
            ("precision", "mine.py:gpt", "--random-tokens", "--batch", "a.pt"),
            "give one",
        ),
        (("precision", "mine.py:gpt", "--text", "a.txt"), "--text needs a tokenizer"),
    ],
)
def test_what_one_command_refuses(
    words: tuple[str, ...], says: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, *words)
    assert code == InputError.exit_code and says in err and err.count("\n") == 1


def test_the_system_refusing_a_file_is_no_defect(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["selection", "mine.py:pair", "--html", "page.html"]

    def full(self: Path, *args: object, **options: object) -> int:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", full)
    code, _, err = run(capsys, *words)
    assert code == InputError.exit_code and "No space left on device" in err
    assert not list(place.glob("*page*"))


def test_a_traceback_is_shown_when_asked_for(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EQUIPOISE_TRACEBACK", "1")
    with pytest.raises(InputError) as raised:
        cli.main(["selection", "mine.py:raises"])
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_an_exception_without_a_message() -> None:
    assert in_one_line(ValueError()) == "ValueError: no message"
    assert torch.is_grad_enabled()


def test_doctor_reads_a_model_and_says_what_it_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "build.py"
    script.write_text(
        "import torch\n"
        "from transformers import GPT2Config, GPT2LMHeadModel\n"
        "def build():\n"
        "    shape = dict(n_layer=2, n_embd=16, n_head=2, vocab_size=32)\n"
        "    model = GPT2LMHeadModel(GPT2Config(**shape))\n"
        "    return model, torch.randint(0, 32, (2, 8))\n"
    )
    with pytest.raises(SystemExit) as left:
        cli.main(["doctor", f"{script}:build", "--json"])
    found = json.loads(capsys.readouterr().out)["model"]
    assert not left.value.code and found["blocks"] == found["attention"] == 2
    assert {"loss", "attention.theta.p5", "update.ratio"} <= set(found["quantities"])
    assert found["ratio"] > 1 and found["share_by_every"]["10"] == pytest.approx(
        (found["ratio"] - 1) / 10
    )


@pytest.mark.parametrize("command", ["precision", "selection", "curvature"])
def test_audits_print_json(
    command: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [command, "mine.py:pair", "--json"]
    if command == "curvature":  # which needs targets
        words = [command, "mine.py:with_targets", "--json"]
    code, out, _ = run(capsys, *words)
    assert code == 0 and json.loads(out)["rows"] and out.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("words", [(), ("--text", "book.txt")])
def test_a_model_without_a_batch_is_refused_before_it_is_loaded(
    place: Path,
    command: str,
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("equipoise.cli.subject.loaded", None)
    (place / "bare" / "config.json").write_text("{}")
    code, _, err = run(capsys, command, "bare", *words)
    assert code == InputError.exit_code and "--random-tokens runs it on noise" in err


def test_an_optimiser_that_is_not_there_is_refused_before_the_model_is_loaded(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("equipoise.cli.subject.loaded", None)
    words = ("mine.py:with_targets", "--optimizer", "none.pt")
    code, _, err = run(capsys, "curvature", *words)
    assert code == InputError.exit_code and "none.pt: no such file" in err


@pytest.mark.parametrize("command", COMMANDS)
def test_shards_outside_the_folder_are_not_loaded(
    place: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "bare" / "config.json").write_text("{}")
    index = {"weight_map": {"w": "../other.safetensors"}}
    text = json.dumps(index)
    (place / "bare" / "model.safetensors.index.json").write_text(text)
    code, _, err = run(capsys, command, "bare", "--random-tokens")
    assert code == InputError.exit_code and "outside its folder" in err


def test_a_page_without_a_name_is_called_after_its_command(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "selection", "mine.py:pair", "--html")[0] == 0
    assert (place / "selection.html").is_file()


def test_a_dead_model_fails_an_audit(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"w": torch.tensor([[float("nan")]])}, place / "dead.pt")
    torch.save({"w": torch.tensor([[1.0]])}, place / "whole.pt")
    assert run(capsys, "audit", "dead.pt")[0] == 1
    assert run(capsys, "audit", "whole.pt")[0] == 0
