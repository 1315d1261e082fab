"""What watching costs, in CPU seconds of the thread that trains."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

SMOOTHING = 0.3


@dataclass(slots=True)
class Meter:
    """Splits a step's time into ours and the patient's.

    Thread time, not wall time: a machine shared with others must not look like a
    slow probe. On an accelerator it counts what the host spends, launches included.
    """

    ours: float = 0.0
    """Of the step under way."""
    cost: float | None = None
    """Of a sampled step, smoothed."""
    plain: float | None = None
    """What a step takes without us, smoothed."""
    _began: float = field(default_factory=time.thread_time)
    _depth: int = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the block as ours; blocks inside it are counted once."""
        self._depth += 1
        start = time.thread_time()
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.ours += time.thread_time() - start

    def end_step(self, *, sampled: bool) -> None:
        """Close the account of a step."""
        now = time.thread_time()
        total, self._began = max(now - self._began, 0.0), now
        ours, self.ours = self.ours, 0.0
        if sampled:
            self.cost = _smoothed(self.cost, ours)
        self.plain = _smoothed(self.plain, max(total - ours, 0.0))


def _smoothed(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)
