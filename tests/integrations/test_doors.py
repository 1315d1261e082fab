"""The names under which other packages know us, in either order of the imports."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TRANSFORMERS = (
    "from transformers.integrations.integration_utils import "
    "get_reporting_integration_callbacks as found"
)
ORDERS = {
    "ours first": f"import equipoise; {TRANSFORMERS}",
    "theirs first": f"{TRANSFORMERS}; import equipoise",
    "Trainer first": f"import transformers.trainer; {TRANSFORMERS}; import equipoise",
}


def python(code: str, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words, "-c", code] if code else [sys.executable, *words],
        capture_output=True, text=True, cwd=cwd, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_trainer_finds_us_by_name(order: str, tmp_path: Path) -> None:
    code = (
        f"{order}\n(made,) = found('equipoise')\n"
        "from equipoise.integrations.hf import EquipoiseCallback\n"
        "assert isinstance(made(), EquipoiseCallback)"
    )
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("order", [1, -1])
def test_an_accelerator_finds_us_by_name(order: int, tmp_path: Path) -> None:
    lines = ["import equipoise", "from accelerate.tracking import filter_trackers"]
    code = "\n".join([*lines[::order], "assert filter_trackers('equipoise')"])
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_importing_us_imports_no_trainer(tmp_path: Path) -> None:
    code = (
        "import sys, equipoise; "
        "assert not {'transformers', 'accelerate', 'torch'} & set(sys.modules)"
    )
    assert python(code, tmp_path).returncode == 0


def test_a_module_imported_behind_our_hook_keeps_its_source(tmp_path: Path) -> None:
    code = (
        "import equipoise, inspect, accelerate.tracking as theirs\n"
        "assert 'GeneralTracker' in inspect.getsource(theirs)"
    )
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore")
def test_report_to_watches_and_takes_the_name_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import equipoise

    monkeypatch.setenv("EQUIPOISE_RUNS", str(tmp_path / "runs"))
    trained(tmp_path, report_to="equipoise", run_name="named")
    (path,) = (tmp_path / "runs").glob("*.eqp")
    run = equipoise.open_run(path)
    assert run.info.name == "named"
    assert list(run.series("loss")[""][0]) == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore")
def test_a_callback_with_options_goes_before_report_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from equipoise.integrations.hf import EquipoiseCallback

    monkeypatch.setenv("EQUIPOISE_RUNS", str(tmp_path / "runs"))
    mine = EquipoiseCallback(run=tmp_path / "mine.eqp")
    trained(tmp_path, report_to=["equipoise"], callbacks=[mine])
    assert (tmp_path / "mine.eqp").is_file()
    assert not [*tmp_path.glob("runs/*.eqp")]


def trained(where: Path, *, callbacks: Any = None, **more: Any) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32)
    rows = torch.randint(0, 32, (16, 8), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(
        str(where / "out"), max_steps=4, save_strategy="no", use_cpu=True,
        disable_tqdm=True, **more,
    )  # fmt: skip
    Trainer(
        GPT2LMHeadModel(config), arguments, train_dataset=data, callbacks=callbacks
    ).train()


SCRIPT = """
import torch
from accelerate import Accelerator
from torch import nn
import equipoise

accelerator = Accelerator(log_with="equipoise", cpu=True)
BEFORE
layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
model = nn.Sequential(nn.Embedding(32, 16), layer, nn.Linear(16, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
AFTER
for step in range(4):
    x = torch.randint(0, 32, (2, 8))
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"loss": loss.item(), "mine": step, "note": "text"}, step=step)
accelerator.end_training()
"""
INIT = (
    'accelerator.init_trackers("named", config={"width": 16}, '
    'init_kwargs={"equipoise": {"run": "run.eqp", "every": 2}})'
)


@pytest.mark.parametrize("place", ["BEFORE", "AFTER"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_accelerate_launch(place: str, ranks: int, tmp_path: Path) -> None:
    """As a user starts it; ``init_trackers`` before or after ``prepare``."""
    import equipoise

    script = SCRIPT.replace(place, INIT).replace("BEFORE\n", "").replace("AFTER\n", "")
    (tmp_path / "train.py").write_text(script)
    words = ["-m", "accelerate.commands.launch", "--cpu", "--num_machines=1"]
    done = python("", tmp_path, *words, f"--num_processes={ranks}", "train.py")
    assert done.returncode == 0, done.stderr
    run = equipoise.open_run(tmp_path / "run.eqp")
    assert run.info.name == "named" and run.info.details["width"] == 16
    assert list(run.series("loss")[""][0]) == [0, 1, 2, 3]
    assert list(run.series("mine")[""][1]) == [0, 1, 2, 3]
    assert "logged.loss" in run.quantities and "gradient.norm" in run.quantities
    assert run.state == "finished"
