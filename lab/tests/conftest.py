"""Both suites share their fixtures and the list of what could not be run."""

from tests.conftest import (
    _nothing_compiled_yet,
    device,
    pytest_runtest_setup,
    rng,
)

__all__ = ["_nothing_compiled_yet", "device", "pytest_runtest_setup", "rng"]
