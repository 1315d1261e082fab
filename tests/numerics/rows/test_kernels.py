"""Kernels that no threads, forks, full disk or missing compiler can break."""

import os
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from equipoise.numerics.compiled import cache_folder, host_view, over_rows
from equipoise.numerics.rows.balance import balance
from tests.conftest import PATIENCE
from tests.oracles import balance as oracle

THREE_ROWS = [
    [0.4, 0.1, 0.4, 0.1, 0.0, 0.0],
    [0.3, 0.25, 0.2, 0.15, 0.06, 0.04],
    [0.9, 0.1, 0.0, 0.0, 0.0, 0.0],
]
WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
import torch
from equipoise.numerics.rows.statistics import row_statistics
from equipoise.numerics.rows.balance import balance, warm_up
from equipoise.numerics.compiled import COMPILED
warm_up()
assert not COMPILED
found = balance(torch.tensor(ROWS, dtype=torch.float64), witness=True)
assert found.exact.all()
assert row_statistics(torch.zeros(2, 6)).theta_lower.tolist() == [1, 1]
print(*found.lower.tolist())
"""


def test_without_numba_the_answer_is_the_same() -> None:
    told = subprocess.run(
        [sys.executable, "-c", f"ROWS = {THREE_ROWS}{WITHOUT_NUMBA}"],
        capture_output=True,
        check=True,
    )
    expected = oracle.theta(np.array(THREE_ROWS))
    assert [float(x) for x in told.stdout.split()] == pytest.approx(expected, rel=1e-15)


NOWHERE_TO_WRITE = """
import torch
from equipoise.numerics.compiled import cache_folder, compiled
@compiled()
def doubled(x):
    return 2 * x
assert doubled(2.0) == 4.0
print(cache_folder())
"""


def test_an_unwritable_cache_is_no_obstacle(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    variables = {**os.environ, "XDG_CACHE_HOME": str(blocked), "HOME": str(blocked)}
    variables.pop("NUMBA_CACHE_DIR", None)
    script = tmp_path / "script.py"
    script.write_text(NOWHERE_TO_WRITE)
    told = subprocess.run(
        [sys.executable, str(script)], capture_output=True, check=True, env=variables
    )
    assert str(blocked) in told.stdout.decode()


def test_the_cache_is_the_users_and_of_this_version() -> None:
    assert cache_folder().parent.name == "equipoise"
    assert cache_folder().name.startswith("kernels-")
    assert not cache_folder().is_relative_to(Path(__file__).parents[3])


def test_an_array_keeps_the_tensor_whose_memory_it_reads() -> None:
    """Of a temporary tensor the memory would be another's while it is read."""
    x = torch.ones(3)
    tensor, array = weakref.ref(x), host_view(x)[1:]
    del x
    assert tensor() is not None and array.tolist() == [1.0, 1.0]
    del array
    assert tensor() is None


def attention(rows: int = 2048, keys: int = 64) -> Tensor:
    rng = torch.Generator().manual_seed(1)
    return torch.randn(rows, keys, generator=rng).softmax(-1)


@pytest.fixture
def two_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_threads_do_not_change_the_answer(two_threads: object) -> None:
    p = attention()
    together = balance(p, witness=True)
    alone = torch.cat([balance(part).lower for part in p.chunk(64)])
    assert torch.equal(together.lower, alone)
    with ThreadPoolExecutor(4) as callers:
        for found in callers.map(lambda _: balance(p, witness=True), range(8)):
            assert torch.equal(found.lower, together.lower)


def test_an_exception_in_a_slice_reaches_the_caller(two_threads: object) -> None:
    def refuse(start: int, stop: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        over_rows(refuse, 1 << 10, 1 << 10)


def test_a_forked_child_can_measure(two_threads: object) -> None:
    p = attention()
    expected = balance(p).lower  # the parent's pool exists before the fork
    child = os.fork()
    if child == 0:
        same = torch.equal(balance(p).lower, expected)
        os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_work_that_splits_again_does_not_wait_for_itself() -> None:
    """Every worker at once asks for the pool: as hard rows of a whole head do."""
    seen: list[int] = []

    def outer(start: int, stop: int) -> None:
        over_rows(lambda a, b: seen.append(b - a), 1 << 10, 1 << 10)

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        asking = threading.Thread(
            target=over_rows, args=(outer, 1 << 10, 1 << 10), daemon=True
        )
        asking.start()
        asking.join(timeout=PATIENCE)
        assert not asking.is_alive()
    finally:
        torch.set_num_threads(threads)
    assert sum(seen) == 8 * (1 << 10)
