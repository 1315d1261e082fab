"""What holds for every test and doctest: its random numbers, and the lane it is in.

Without the same numbers a doctest that makes a layer sees weights that depend on how
the tests were dealt to the processes, and can fail on one machine only. ``TEST_SEED``
moves the seed, to find a test that holds for one draw and not for another.
"""

import os
import random
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import quick_lane

# Tests name the steps that they sample; the dense start has tests of its own.
os.environ["EQUIPOISE_DENSE_START"] = "0"

# Importing these imports triton, which stands beside the other packages.
collect_ignore_glob = [] if find_spec("triton") else ["src/*/numerics/rows/triton_*.py"]


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    seed = int(os.environ.get("TEST_SEED", "0"))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "only the tests for every commit: all but those of tests/quick_lane.toml"
    parser.addoption("--quick", action="store_true", help=help)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    quick = config.getoption("quick")
    return (quick and quick_lane.read().leaves_out_file(collection_path)) or None


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    if not config.getoption("quick"):
        return
    lane = quick_lane.read()
    slow = [item for item in items if lane.leaves_out_test(item.path, item.name)]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in {*slow}]
