"""Retry what cannot be written: a full disk, or a run file that was deleted.

A run that takes weeks must not lose its readings, nor its training, to an hour without
room. What cannot be written stays in memory within a bound, and is tried again with the
next append; findings say so.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from equipoise.errors import RunFileError
from equipoise.judging.card import Card
from equipoise.records import Applied, Finding, Reading
from equipoise.store.writer import RunWriter

MOST_VALUES = 2_000_000
"""Numbers kept in memory while the file cannot be written, about 100 MB."""


class RetryingWriter:
    """A writer that keeps what cannot be written yet, within a bound, and retries."""

    def __init__(self, writer: RunWriter, *, most_values: int = MOST_VALUES) -> None:
        self._writer = writer
        self._most = most_values
        self._waiting: deque[tuple[list[Reading], list[Finding], list[Applied]]] = (
            deque()
        )
        self._card: Card | None = None
        self._step = self._values = self._dropped = 0
        self._failing = False

    def append(
        self,
        readings: Sequence[Reading],
        findings: Sequence[Finding] = (),
        applied: Sequence[Applied] = (),
        card: Card | None = None,
    ) -> list[Finding]:
        """Write, or keep; return what there is to say about the file itself."""
        steps = [*(r.step for r in readings), *(f.step for f in findings)]
        self._step = max([self._step, *steps])
        self._card = card or self._card
        self._keep(list(readings), list(findings), list(applied))
        try:
            self._flush()
        except RunFileError as error:
            return self._trouble(error)
        return self._recovery()

    def close(self) -> list[Finding]:
        """Close the file; return what there is to say about what is not in it."""
        try:
            self._flush()
            self._writer.close()
        except RunFileError as error:
            with suppress(RunFileError):
                self._writer.close()
            readings = sum(len(kept) for kept, *_ in self._waiting) + self._dropped
            return [_unsaved(self._step, readings, error)]
        if self._writer.pop_rewritten():
            return [_rewritten(self._step, self._writer.path)]
        return []

    def _keep(
        self, readings: list[Reading], findings: list[Finding], applied: list[Applied]
    ) -> None:
        self._waiting.append((readings, findings, applied))
        self._values += _size(readings)
        for kept, *_ in self._waiting:
            if self._values <= self._most:
                return
            self._values -= _size(kept)
            self._dropped += len(kept)
            kept.clear()  # the oldest; its findings stay

    def _flush(self) -> None:
        while self._waiting:
            readings, findings, applied = self._waiting[0]
            card = self._card
            if readings or findings or applied or card is not None:
                self._writer.append(
                    readings, findings=findings, applied=applied, card=card
                )
                self._card = None
            self._waiting.popleft()
            self._values -= _size(readings)

    def _trouble(self, error: RunFileError) -> list[Finding]:
        if self._failing:
            return []
        self._failing = True
        found = [_not_written(self._step, error)]
        self._waiting.append(([], found, []))
        return found

    def _recovery(self) -> list[Finding]:
        found = []
        if self._writer.pop_rewritten():
            found.append(_rewritten(self._step, self._writer.path))
        if self._failing:
            found.append(_written_again(self._step, self._dropped))
        self._failing, self._dropped = False, 0
        if found:
            self._waiting.append(([], found, []))
            with suppress(RunFileError):
                self._flush()
        return found


def _size(readings: Sequence[Reading]) -> int:
    return sum(sum(map(len, reading.values)) for reading in readings)


def _not_written(step: int, error: RunFileError) -> Finding:
    return Finding.warn(step, "store.not_written", error=str(error))


def _written_again(step: int, dropped: int) -> Finding:
    if dropped:
        return Finding.error(step, "store.written_again", case="lost", dropped=dropped)
    return Finding.info(step, "store.written_again", dropped=0)


def _rewritten(step: int, path: Path) -> Finding:
    return Finding.error(step, "store.file_lost", path=str(path))


def _unsaved(step: int, readings: int, error: RunFileError) -> Finding:
    return Finding.error(step, "store.not_saved", readings=readings, error=str(error))
