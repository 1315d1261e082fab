"""A forked child forgets the writer; the parent's file does not notice."""

import subprocess
import sys
from pathlib import Path

from equipoise.store import open_run
from tests.conftest import PATIENCE
from tests.store.example_runs import assert_summaries_agree, files

CHILD = """
import os, sqlite3, sys, threading
from equipoise.errors import RunFileError
from equipoise.store import RunWriter, open_run
from tests.store.example_runs import INFO, sample

path, stop = sys.argv[1], threading.Event()
writer = RunWriter(path, INFO)
step = 0

def write():
    global step
    while not stop.is_set():
        writer.append(sample(step))
        step += 1

def run_in_the_child():
    try:
        writer.append(sample(10**6))
    except RunFileError as refusal:
        assert "parent" in str(refusal)
    else:
        os._exit(3)
    steps = open_run(path).steps  # a reader of its own still works
    assert steps.tolist() == list(range(len(steps)))
    writer.close()
    sys.exit(0)                   # with full interpreter shutdown

worker = threading.Thread(target=write, daemon=True)
worker.start()
while step < 3:
    pass
forks = 12 if hasattr(os, "fork") else 0
for _ in range(forks):            # while another thread is busy writing
    pid = os.fork()
    if pid == 0:
        run_in_the_child()
    assert os.waitpid(pid, 0)[1] == 0
    assert os.path.exists(path + "-wal")
stop.set()
worker.join()
writer.append(sample(step))
writer.close()
print(step + 1)
"""


def test_forked_children_do_not_touch_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.eqp"
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert open_run(path).steps.tolist() == list(range(int(done.stdout)))
    assert_summaries_agree(open_run(path))
    assert files(tmp_path) == ["run.eqp"]
