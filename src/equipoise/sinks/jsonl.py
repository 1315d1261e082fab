"""JSON lines, one object per step: ``{"step": 3, "loss": 2.5}``."""

import json
import math
from pathlib import Path

from equipoise.sinks import Values


class JsonLines:
    """Appends to a text file; NaN and Inf become text, since JSON has neither."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = path.open("a", encoding="utf-8")

    def log(self, values: Values, step: int) -> None:
        plain = {
            k: v if math.isfinite(v) else repr(float(v)) for k, v in values.items()
        }
        line = json.dumps({"step": step, **plain}, allow_nan=False)
        self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def opened(target: Path) -> JsonLines:
    """Open ``target``, with ``.jsonl`` where it has no suffix of its own."""
    return JsonLines(target if target.suffix else target.with_suffix(".jsonl"))
