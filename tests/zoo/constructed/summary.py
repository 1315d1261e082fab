"""Counts over the rows of the table."""

from collections import Counter
from collections.abc import Sequence
from typing import Any


def counts(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Return how many classes were built, and how many of these are what.

    >>> counts([{"status": "read"}, {"status": "not built"}])
    {'classes': 2, 'built': 1, 'read': 1}
    """
    found = Counter(row.get("status", "failed") for row in rows)
    built = len(rows) - found.pop("not built", 0)
    return {"classes": len(rows), "built": built, **dict(sorted(found.items()))}
