"""What every command that judges prints with ``--json``: one head, one schema.

``judged.schema.json`` beside this file is the schema; a command adds fields of its own
behind the head.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from equipoise.judging.verdict import STATES, State, Verdict

SCHEMA = 1
"""Raised when a field changes its meaning or goes; new fields leave it as it is."""
SCHEMA_FILE = Path(__file__).with_name("judged.schema.json")


def judged_json(
    command: str,
    judged: Iterable[tuple[str, Verdict | None]],
    own: Mapping[str, Any],
    *,
    indent: int | None = None,
) -> str:
    """Return the answer of a command: the head, then what is its own.

    A name without a verdict could not be read; its state counts as not judged.
    """
    pairs = [(name, verdict) for name, verdict in judged]
    head = {
        "schema": SCHEMA,
        "command": command,
        "state": _worst(verdict for _, verdict in pairs),
        "judged": [
            {"name": name, "verdict": verdict and json.loads(verdict.to_json())}
            for name, verdict in pairs
        ],
    }
    return json.dumps(head | dict(own), ensure_ascii=False, indent=indent)


def _worst(verdicts: Iterable[Verdict | None]) -> State:
    states = [v.state if v is not None else "not judged" for v in verdicts]
    return max(states, key=STATES.index, default="not judged")
