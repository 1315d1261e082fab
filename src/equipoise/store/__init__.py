"""The run file: one SQLite file between the side that trains and the side that reads.

``docs/store.md`` has the schema, what survives what, and how to read a run without us.
"""

from equipoise.store.level_of_detail import Summary
from equipoise.store.location import run_path, runs_directory
from equipoise.store.reader import News, Run, open_run
from equipoise.store.retrying import RetryingWriter
from equipoise.store.writer import RunWriter

__all__ = [
    "News",
    "RetryingWriter",
    "Run",
    "RunWriter",
    "Summary",
    "open_run",
    "run_path",
    "runs_directory",
]
