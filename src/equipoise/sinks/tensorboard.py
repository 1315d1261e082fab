"""TensorBoard event files, written with its own writer: torch is not needed."""

import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from equipoise.sinks import Values


class EventFiles:
    """Scalars in a directory that ``tensorboard --logdir`` reads."""

    def __init__(self, folder: Path) -> None:
        self._writer = EventFileWriter(str(folder))

    def log(self, values: Values, step: int) -> None:
        summary = Summary(
            value=[Summary.Value(tag=k, simple_value=v) for k, v in values.items()]
        )
        event = Event(wall_time=time.time(), step=step, summary=summary)
        self._writer.add_event(event)

    def close(self) -> None:
        self._writer.close()


def opened(target: Path) -> EventFiles:
    """Open a directory of event files."""
    return EventFiles(target)
