"""Fixtures shared by every test, and the list of what could not be run."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from equipoise.probes.window import compiled

# Same examples every run, and no wall-clock verdicts: a slow runner is not a bug.
settings.register_profile("equipoise", deadline=None, derandomize=True)
settings.load_profile("equipoise")
# For the nightly: other examples each time, and how to repeat one that fails.
settings.register_profile("random", deadline=None, derandomize=False, print_blob=True)
torch.set_num_threads(1)  # tiny tensors: threads cost more than they give
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Inductor's cache does not know of ATEN_CPU_CAPABILITY: code that it vectorised under
# one setting would be compiled, and fail, under another.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    f"{tempfile.gettempdir()}/inductor-{torch.backends.cpu.get_cpu_capability()}",
)

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
# Seconds to wait for what always comes: only a broken program takes them all, however
# slow or busy the machine.
PATIENCE = 600
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

# What a test may need beyond the dev environment, and how to tell that it is there.
NEEDS = {
    "chromium": lambda: shutil.which("chromium") or shutil.which("google-chrome"),
    "c++": lambda: shutil.which("g++") or shutil.which("clang++"),
    # flash-attn's Python code, which ./dev puts beside the other packages.
    "flash-attn": (Path(sys.prefix) / "flash-attn").is_dir,
    "triton": (Path(sys.prefix) / "triton").is_dir,
}
# There is no wheel of it for any other system, so CI cannot install it there.
LINUX_ONLY = {"triton"}


def missing(item: pytest.Item) -> list[str]:
    wanted = [name for mark in item.iter_markers("needs") for name in mark.args]
    return [name for name in wanted if not NEEDS[name]()]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that cannot run is NOT RUN, said at the end; in CI that is a failure."""
    absent = missing(item)
    if not absent:
        return
    reason = f"NOT RUN: needs {', '.join(absent)}"
    installable = {*absent} - (LINUX_ONLY if sys.platform != "linux" else set())
    if installable and os.environ.get("CI") == "true":
        pytest.fail(f"{reason}; CI must install it (.ci/run)", pytrace=False)
    pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.stats.get("skipped", []):
        terminalreporter.write_line(f"{report.nodeid}: {report.longrepr[2]}")


@pytest.fixture(autouse=True)
def _nothing_compiled_yet() -> None:
    """No test finds code that an earlier one compiled: what is read depends on it."""
    if compiled():
        torch._dynamo.reset()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def error_budget(*dtypes: torch.dtype, ops: int) -> float:
    """Return ops · ε of the coarsest dtype involved: a tolerance with a reason."""
    return ops * max(torch.finfo(dtype).eps for dtype in dtypes)
