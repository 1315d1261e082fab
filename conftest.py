"""The same random numbers for every test and doctest, whatever ran before it.

Without this a doctest that makes a layer sees weights that depend on how the tests were
dealt to the processes, and can fail on one machine only. ``TEST_SEED`` moves the seed,
to find a test that holds for one draw and not for another.
"""

import os
import random
from importlib.util import find_spec

import numpy as np
import pytest
import torch

# Importing these imports triton, which stands beside the other packages.
collect_ignore_glob = [] if find_spec("triton") else ["src/*/numerics/rows/triton_*.py"]


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    seed = int(os.environ.get("TEST_SEED", "0"))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
