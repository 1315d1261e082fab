"""Files and pipes we did not make: one clear line, the documented code, no code run."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from equipoise import cli
from equipoise.auditing import subject as opening
from equipoise.auditing.subject import loaded_batch
from equipoise.errors import InputError, RunFileError
from equipoise.watching.step import batch
from tests.cli.test_cli import run
from tests.conftest import PATIENCE
from tests.report.runs import pre_and_post

GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 1,
    "n_positions": 16,
    "vocab_size": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


class Evil:
    """Unpickling it would write a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GPT2))
    return folder


def test_a_pickle_with_code_is_refused_and_not_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = folder.parent / "ran"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"w": Evil(mark)}))
    code, _, err = run(capsys, "precision", str(folder), "--random-tokens")
    assert code == InputError.exit_code and err.count("\n") == 1 and "defect" not in err
    assert not mark.exists()


@pytest.mark.parametrize("content", [b"", b"junk" * 100, b"\xff" * 64])
def test_broken_weights_are_one_line(
    folder: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "model.safetensors").write_bytes(content)
    code, _, err = run(capsys, "precision", str(folder), "--random-tokens")
    assert code == InputError.exit_code and str(folder) in err and "defect" not in err


def test_a_link_to_another_file_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = folder.parent / "secret"
    secret.write_text("the password is swordfish")
    (folder / "model.safetensors").symlink_to(secret)
    code, _, err = run(capsys, "precision", str(folder), "--random-tokens")
    assert code == InputError.exit_code and "swordfish" not in err


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_in_a_model_folder_does_not_hang(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    code, _, err = run(capsys, "precision", str(folder), "--random-tokens")
    assert code == InputError.exit_code and err.count("\n") == 1


def test_a_checkpoints_own_code_is_never_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = folder.parent / "ran"
    own = {"auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}
    named = {**GPT2, **own, "model_type": "own"}
    (folder / "config.json").write_text(json.dumps(named))
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w')")
    done = subprocess.run(
        [sys.executable, "-m", "equipoise", "precision", str(folder)],
        input="y\n" * 5,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == InputError.exit_code and not mark.exists()
    assert "defect" not in done.stderr


def test_a_broken_tokenizer_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(**GPT2)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{torn")
    code, _, err = run(capsys, "selection", str(folder))
    assert code == InputError.exit_code and "defect" not in err


BATCHES = {
    "nested.json": b"[" * 100_000,
    "deep.json": b'{"x": ' + b"[" * 5000 + b"1" + b"]" * 5000 + b"}",
    "binary.json": b"\xff\xfe\x00",
    "junk.pt": b"junk" * 1000,
    "zip.pt": b"PK\x03\x04" + b"junk" * 1000,
    "junk.safetensors": b"\xff" * 1000,
    "short.safetensors": b"ab",
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_broken_batch_is_our_error(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(BATCHES[name])
    with pytest.raises(InputError, match=name):
        loaded_batch(path)


@pytest.mark.parametrize("suffix", [".json", ".pt", ".safetensors"])
def test_a_large_junk_batch_is_refused_by_its_start(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"large{suffix}"
    with path.open("wb") as stream:
        stream.write(b"\xff" * 8)
        stream.truncate(1 << 30)  # sparse: it takes no room

    def too_much(*args: object, **kwargs: object) -> None:
        raise AssertionError("all of it was read")

    monkeypatch.setattr(torch, "load", too_much)
    monkeypatch.setattr(Path, "read_text", too_much)
    monkeypatch.setattr(opening.json, "loads", too_much)
    with pytest.raises(InputError):
        loaded_batch(path)


def test_good_batches_still_open(tmp_path: Path) -> None:
    x = torch.arange(4)
    (tmp_path / "a.json").write_text('{"x": [0, 1, 2, 3]}')
    torch.save({"x": x}, tmp_path / "a.pt")
    torch.save({"x": x}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file({"x": x}, tmp_path / "a.safetensors")
    for path in tmp_path.iterdir():
        assert torch.equal(loaded_batch(path)["x"], x), path


MODELS = """
from torch import nn
def linear():
    return nn.Linear(3, 3)
"""
BUNDLES = {
    "a list": [1, 2],
    "no weights": {"args": ()},
    "other names": {"weights": {"other": torch.zeros(2)}},
    "other shapes": {"weights": {"weight": torch.zeros(2), "bias": torch.zeros(2)}},
    "weights alone": {"weights": nn.Linear(3, 3).state_dict()},
    "weights of no kind": {"weights": 3},
}


@pytest.mark.parametrize("kind", BUNDLES)
def test_a_saved_step_of_another_kind_is_one_line(
    kind: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "replayed.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    torch.save(BUNDLES[kind], "a.eqp.step-3.pt")
    Path("a.eqp.step-x.pt").write_text("not a step")
    code, _, err = run(capsys, "replay", "a.eqp", "--model", "replayed:linear")
    assert code == InputError.exit_code and err.count("\n") == 1
    assert "step-3.pt" in err


def test_a_run_with_brackets_in_its_name_is_found(tmp_path: Path) -> None:
    path = tmp_path / "lr[1e-3].eqp"
    batch.bundle_path(path, 7).write_text("")
    assert list(batch.bundles(path)) == [7]


def test_a_link_to_nothing_does_not_break_a_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pre_and_post(tmp_path, steps=30)
    (tmp_path / "gone.eqp").symlink_to(tmp_path / "nowhere.eqp")
    code, out, _ = run(capsys, "runs", str(tmp_path))
    assert code == 0 and "pre-LN" in out and "no such run file" in out
    monkeypatch.setenv("EQUIPOISE_RUNS", str(tmp_path))
    assert run(capsys, "report")[0] == 0
    for path in tmp_path.glob("p*.eqp"):
        path.unlink()
    assert run(capsys, "report")[0] == RunFileError.exit_code


def test_runs_for_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep = tmp_path / ("a-rather-long-folder-name-" * 8) / "inner"
    deep.mkdir(parents=True)
    pre_and_post(deep, steps=30)
    code, out, _ = run(capsys, "runs", str(tmp_path), "--json")
    rows = json.loads(out)["runs"]
    assert code == 0 and {row["name"] for row in rows} == {"pre-LN", "post-LN"}
    assert all(Path(row["path"]).is_file() for row in rows)
    assert {row["last_step"] for row in rows} == {29}
    pre_and_post(tmp_path, steps=60)
    found = json.loads(run(capsys, "runs", str(tmp_path), "--json")[1])["runs"]
    counts = [row["severities"] for row in found if row["last_step"] == 59]
    assert {"error": 1} in counts and {} in counts
    code, out, _ = run(capsys, "runs", str(tmp_path))
    assert str(deep / "pre.eqp") in out  # whole, although nothing is as wide


def piped(words: list[str], target: str) -> subprocess.CompletedProcess[str]:
    command = f"{sys.executable} -m equipoise {' '.join(words)} {target}"
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def test_a_closed_pipe_ends_the_command_without_an_error(tmp_path: Path) -> None:
    done = piped(["runs", "--help"], "| true")
    assert done.returncode in (0, 1, cli.CLOSED_PIPE) and done.stderr == ""


@pytest.mark.parametrize("words", [["--help"], ["plan", "4", "64", "4"], ["runs", "."]])
def test_a_full_standard_output_is_no_defect(words: list[str]) -> None:
    done = piped(words, "> /dev/full")
    assert done.returncode == InputError.exit_code
    assert done.stderr == "equipoise: standard output: No space left on device\n"
