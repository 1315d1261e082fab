"""Everything that leaves the training process: to the run file and the sinks."""

from collections.abc import Sequence

from equipoise.records import Finding, Reading
from equipoise.store import RunWriter
from equipoise.watching.options import Sink


class Ledger:
    """Writes what the ranks agreed on; only the first rank has a file and sinks."""

    def __init__(self, writer: RunWriter | None, sinks: Sequence[Sink]) -> None:
        self._writer = writer
        self._sinks = sinks if writer is not None else ()

    def write(self, readings: Sequence[Reading], findings: Sequence[Finding]) -> None:
        """Commit readings and findings in one transaction, then tell the sinks."""
        if self._writer is None or not (readings or findings):
            return
        self._writer.append(readings, findings=findings)
        for sink in self._sinks:
            for step, values in by_step(readings).items():
                sink.log(values, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def by_step(readings: Sequence[Reading]) -> dict[int, dict[str, float]]:
    """Return step → flat names → numbers, one per site: the mean over its heads.

    Example:
        >>> by_step([Reading.scalar(3, "loss", 0.5)])
        {3: {'loss': 0.5}}
    """
    out: dict[int, dict[str, float]] = {}
    for reading in readings:
        here = out.setdefault(reading.step, {})
        for site, values in zip(reading.sites, reading.values, strict=True):
            name = f"{reading.quantity}/{site}" if site else reading.quantity
            if values:
                here[name] = sum(values) / len(values)
    return out
