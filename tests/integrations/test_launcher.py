"""``equipoise run`` on a script that does not know of us."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import equipoise
from equipoise import cli
from equipoise.errors import InputError
from equipoise.integrations.launcher import launched, owner

MODEL = """
import argparse, sys, torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(8, 8))
        self.num_heads = 2
    def forward(self, x):
        maps = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in maps)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))

def loss(model):
    return model(torch.randn(2, 6, 8)).square().mean()
"""

SCRIPT = (
    MODEL
    + """
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=float(sys.argv[1]))
for _ in range(7):
    model(torch.randn(2, 6, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save(model.state_dict(), sys.argv[2])
assert __name__ == "__main__" and "--flag" in sys.argv
"""
)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_the_script_trains_as_it_would_alone(script: Path, tmp_path: Path) -> None:
    alone, watched, run = (tmp_path / name for name in ("a.pt", "b.pt", "run.eqp"))
    command = [sys.executable, str(script), "0.01", str(alone), "--flag"]
    subprocess.run(command, check=True)
    command = [
        sys.executable,
        "-m",
        "equipoise",
        "run",
        "--every",
        "2",
        "--run",
        str(run),
    ]
    command += [str(script), "0.01", str(watched), "--flag"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert not done.stdout
    ours = [line for line in done.stderr.splitlines() if "equipoise" in line]
    # Rules may report on so small a model; those lines name a step.
    lines = [line for line in ours if ": step " not in line]
    first, *card, last = lines
    assert [line.split()[1] for line in card] == ["model:", "loss:", "loop:"], ours
    assert (first.split()[1], last.split()[1]) == ("watching", "7")
    assert str(run) in first and str(run) in last
    before, after = torch.load(alone), torch.load(watched)
    assert all(torch.equal(before[name], after[name]) for name in before)
    reader = equipoise.open_run(run)
    assert list(reader.series("loss")[""][0]) == [*range(7)]
    ((sampled, _),) = reader.series("attention.theta.p50").values()
    assert list(sampled) == [0, 2, 4, 6]  # initialisation is step 0


def test_a_failing_script_shows_its_own_traceback(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("def train():\n    raise ValueError('no data today')\ntrain()\n")
    command = [sys.executable, "-m", "equipoise", "run", str(script)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ValueError: no data today" in done.stderr and "in train" in done.stderr


ACCUMULATING = """
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(parser.parse_args().steps):
        for _ in range(3):
            (loss(model) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()

if __name__ == "__main__":
    main()
"""

RIVALS = """
class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.maker, self.judge = Model(), Model()

both = Both()
makes = torch.optim.Adam(both.maker.parameters())
judges = torch.optim.SGD(both.judge.parameters(), lr=0.1)
for _ in range(5):
    for model, optimizer in ((both.judge, judges), (both.maker, makes)):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
"""

SHARED = """
model = Model()
matrices = torch.optim.SGD([p for p in model.parameters() if p.ndim == 2], lr=0.1)
vectors = torch.optim.Adam([p for p in model.parameters() if p.ndim == 1])
for _ in range(5):
    loss(model).backward()
    for optimizer in (matrices, vectors):
        optimizer.step()
        optimizer.zero_grad()
"""

FROZEN = """
model = nn.Sequential(Model(), nn.Linear(8, 8))
model[0].requires_grad_(False)
optimizer = torch.optim.Adam(p for p in model.parameters() if p.requires_grad)
for _ in range(5):
    loss(model).backward()
    optimizer.step()
    optimizer.zero_grad()
"""

SWEEP = """
def train():
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()

for _ in range(3):
    train()
"""

WRAPPED = """
model = Model()
optimizer = torch.optim.AdamW(model.parameters())
model = torch.compile(model, backend="aot_eager")
with torch.no_grad():
    model(torch.randn(2, 6, 8))
for _ in range(5):
    loss(model).backward()
    optimizer.step()
    optimizer.zero_grad()
"""

BY_FORWARD = """
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    q = torch.nn.functional.linear(torch.randn(2, 8), model.q_proj.weight)
    q.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

SHAPES = {  # script, arguments, steps of each run
    "accumulating": (ACCUMULATING, ["--steps", "5"], [5]),
    "rivals": (RIVALS, [], [5, 5]),
    "shared": (SHARED, [], [5]),
    "frozen": (FROZEN, [], [5]),
    "sweep": (SWEEP, [], [3, 3, 3]),
    "wrapped": (WRAPPED, [], [5]),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_scripts_of_every_shape(shape: str, tmp_path: Path) -> None:
    body, arguments, steps = SHAPES[shape]
    script, run = tmp_path / "train.py", tmp_path / "run.eqp"
    script.write_text(MODEL + body)
    runs = launched(script, arguments, run=run, every=2)
    assert [path.name for path in runs] == ["run.eqp", "run-2.eqp", "run-3.eqp"][
        : len(steps)
    ]
    assert torch.nn.Module.__call__ is torch.nn.Module._wrapped_call_impl
    for path, count in zip(runs, steps, strict=True):
        reader = equipoise.open_run(path)
        assert list(reader.series("loss")[""][0]) == [*range(count)]
        ((sampled, _),) = reader.series("attention.theta.p50").values()
        assert list(sampled) == [*range(0, count, 2)]
        assert not [f for f in reader.findings if f.severity != "info"]


def test_two_optimisers_of_one_model_are_one_run(tmp_path: Path) -> None:
    """Its steps end when both have stepped, and both rates are recorded."""
    script, run = tmp_path / "train.py", tmp_path / "run.eqp"
    script.write_text(MODEL + SHARED)
    (path,) = launched(script, [], run=run, every=2)
    reader = equipoise.open_run(path)
    assert reader.series("learning_rate")[""][1].tolist() == [0.1] * 5
    assert reader.series("learning_rate.2")[""][1].tolist() == [0.001] * 5


def test_a_model_that_is_never_called_keeps_the_scripts_numbers(
    tmp_path: Path,
) -> None:
    """Its functions use the weights: it is seen after its first step."""
    script = tmp_path / "train.py"
    script.write_text(MODEL + BY_FORWARD)
    (run,) = launched(script, [], run=tmp_path / "run.eqp", every=1)
    assert list(equipoise.open_run(run).series("loss")[""][0]) == [1, 2, 3, 4]


ENDS = {
    "error": ("raise ValueError('no data today')", 1),
    "interrupt": ("raise KeyboardInterrupt", 130),
    "exit": ("sys.exit(7)", 7),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_run_is_kept_however_the_script_ends(end: str, tmp_path: Path) -> None:
    body, code = ENDS[end]
    script, run = tmp_path / "train.py", tmp_path / "run.eqp"
    script.write_text(f"{MODEL}{FROZEN}{body}\n")
    command = [sys.executable, "-m", "equipoise", "run", "--run", str(run), str(script)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, done.stderr[-2000:]
    assert str(run) in done.stderr and not done.stdout
    assert len(equipoise.open_run(run).series("loss")[""][0]) == 5


def test_an_option_that_makes_no_sense_is_refused_before_the_script_runs(
    script: Path,
) -> None:
    with pytest.raises(InputError, match="every=0"):
        launched(script, [], every=0)


def test_the_environment_is_read_and_other_objects_are_left_alone(
    script: Path, tmp_path: Path
) -> None:
    """One process, because the command line used to override both."""
    stranger = (
        "class Proxy:\n"
        "    @property\n"
        "    def __class__(self): raise RuntimeError('touched')\n"
        "proxy = Proxy()\n"
    )
    script.write_text(stranger + SCRIPT)
    run = tmp_path / "run.eqp"
    command = [sys.executable, "-m", "equipoise", "run", "--run", str(run)]
    command += [str(script), "0.01", str(tmp_path / "a.pt"), "--flag"]
    subprocess.run(command, check=True, env={**os.environ, "EQUIPOISE_EVERY": "3"})
    entropy = equipoise.open_run(run).series("attention.entropy")
    assert [list(steps) for steps, _ in entropy.values()] == [[0, 3, 6]]


def test_a_missing_script_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such script"):
        launched(tmp_path / "nowhere.py", [])


def test_the_owner_is_the_outermost_module() -> None:
    inner = torch.nn.Linear(2, 2)
    outer = torch.nn.Sequential(inner, torch.nn.ReLU())
    assert owner(torch.optim.SGD(inner.parameters(), lr=1)) is outer
    loose = torch.nn.Parameter(torch.zeros(2))
    assert owner(torch.optim.SGD([loose], lr=1)) is None


def test_options_of_the_command_reach_the_run(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "named.eqp"
    words = ["run", "--run", str(run), "--name", "baseline", "--preset", "minimal"]
    words += [
        "--every",
        "3",
        "--budget",
        "1.0",
        "--sink",
        f"jsonl:{tmp_path / 'x.jsonl'}",
    ]
    with pytest.raises(SystemExit) as left:
        cli.main([*words, str(script), "0.01", str(tmp_path / "a.pt"), "--flag"])
    assert not left.value.code
    found = equipoise.open_run(run)
    assert found.info.name == "baseline" and "residual.B" not in found.quantities
    assert (tmp_path / "x.jsonl").read_text().count('"loss"') == len(found.steps)
    (steps, _), *_ = found.series("attention.theta.p50").values()
    assert set(steps % 3) == {steps[0] % 3}
    for option, value in (("--preset", "huge"), ("--budget", "7"), ("--sink", "nope")):
        with pytest.raises(SystemExit) as left:
            cli.main(["run", option, value, str(script)])
        assert left.value.code == InputError.exit_code
