"""``equipoise.audit``: a verdict on a model as it stands, from weights and from data.

The weights are read tensor by tensor. With a batch, everything ``watch`` measures is
measured once, on a copy, and the rules that make sense at one point judge it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from equipoise.auditing.weights.checkpoint import open_checkpoint
from equipoise.auditing.weights.entries import (
    Checkpoint,
    Entry,
    in_memory,
    printable,
)
from equipoise.auditing.weights.measures import Measurement, Progress, measure
from equipoise.auditing.weights.packs import unpacked
from equipoise.judging.judge import Judge
from equipoise.judging.verdict import Verdict
from equipoise.records import Finding, Reading
from equipoise.text.templates import template
from equipoise.text.verdict_text import worded

if TYPE_CHECKING:
    from equipoise.auditing.subject import ModelSource
    from equipoise.auditing.weights.comparison import Comparison

Auditable = str | Path | nn.Module | Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """A verdict on a model as it stands, with the numbers behind it."""

    subject: str
    verdict: Verdict
    readings: tuple[Reading, ...]
    facts: tuple[str, ...]
    """What was read, and on what."""
    comparison: "Comparison | None" = None
    source: "ModelSource | None" = None
    """What it was run on; None for weights alone."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was found, the gravest first."""
        return self.verdict.findings

    def reading(self, quantity: str) -> dict[str, tuple[float, ...]]:
        """Return one quantity, site → values; empty where it was not measured."""
        found = (r for r in self.readings if r.quantity == quantity)
        return next((dict(zip(r.sites, r.values, strict=True)) for r in found), {})

    def to_json(self) -> str:
        given: dict[str, Any] = {
            "subject": self.subject,
            "verdict": json.loads(self.verdict.to_json()),
            "facts": list(self.facts),
            "readings": [json.loads(r.to_json()) for r in self.readings],
        }
        if self.source is not None:
            given["source"] = asdict(self.source)
        if self.comparison is not None:
            given["changes"] = [json.loads(c.to_json()) for c in self.comparison.moved]
        return json.dumps(given)


def audit(
    model: Auditable,
    batch: Any = None,
    *,
    against: Auditable | None = None,
    source: "ModelSource | None" = None,
    progress: Progress = lambda share: None,
) -> Audit:
    """Return a verdict on a model: from its weights, and on a batch if there is one.

    Args:
        model: A checkpoint's path, a model, or a state dict. With a batch, a model or
            what the other audits take for one.
        batch: Anything the model takes, with targets where it has a loss.
        against: An earlier checkpoint, to see what moved.
        source: What the batch is, for the first line.
        progress: Called with the share of the work that is done.

    Raises:
        InputError: If there is no such checkpoint, or it is broken.

    Example:
        >>> audit(nn.TransformerEncoderLayer(32, 4, 64)).verdict.state
        'healthy'
    """
    # What only a batch or a second checkpoint needs is imported where it is used.
    if batch is not None and not isinstance(model, nn.Module):
        from equipoise.auditing.subject import loaded

        model = loaded(str(model)).model
    checkpoint = _checkpoint(model)
    differing, compared_with = _declared(model, checkpoint)
    weights = measure(checkpoint, progress=progress)
    readings = weights.readings()
    facts = [*_facts(checkpoint, weights), *compared_with]
    compared: Comparison | None = None
    if against is not None:
        from equipoise.auditing.weights.comparison import compare

        old = _checkpoint(against)
        compared = compare(checkpoint, old)
        readings, facts = (
            readings + compared.readings(),
            facts + compared.facts(old.name),
        )
    judge = _judge(checkpoint, weights)
    judge.note(differing)
    judge.add_at_once(readings)
    if batch is not None:
        from equipoise.auditing.one_pass import audit_batch
        from equipoise.auditing.subject import ModelSource

        assert isinstance(model, nn.Module)
        point = audit_batch(model, batch)
        judge.note(point.findings)
        readings = readings + point.readings
        source = source or ModelSource(name="the batch given")
        facts += point.notes
    return Audit(
        subject=checkpoint.name,
        verdict=worded(judge.verdict),
        readings=tuple(readings),
        facts=tuple(facts),
        comparison=compared,
        source=None if batch is None else source,
    )


def _checkpoint(model: Auditable) -> Checkpoint:
    if isinstance(model, nn.Module):
        found = in_memory(model, name=type(model).__name__)
    elif isinstance(model, Mapping):
        found = in_memory(model, name="state dict")
    else:
        found = open_checkpoint(Path(model))
    return unpacked(found)


def _declared(
    model: Auditable, checkpoint: Checkpoint
) -> tuple[list[Finding], list[str]]:
    """Return how a file differs from its configuration, and what was compared."""
    if isinstance(model, nn.Module | Mapping) or not checkpoint.config:
        return [], []
    # Here, not above: a file without a configuration needs none of it.
    from equipoise.auditing.weights.declared import compared

    return compared(checkpoint, Path(model))


DECLARE = {
    False: "put config.json beside the file",
    True: "give each such module its own count, as in module.num_heads = 8",
}
"""How a number of heads is declared: for a file, and for a model in memory."""


def _facts(checkpoint: Checkpoint, weights: Measurement) -> list[str]:
    entries = checkpoint.entries
    numbers = sum(e.numel for e in entries.values())
    kinds = sorted({str(e.dtype).removeprefix("torch.") for e in entries.values()})
    lines = [
        f"{checkpoint.format}: {len(entries)} tensors, {numbers:,} numbers "
        f"({', '.join(kinds)}), {weights.attentions} attention modules recognised"
    ]
    if weights.headless:
        lines.append(
            f"{weights.headless} attention modules without a known number of heads: "
            f"heads were not looked at ({DECLARE[checkpoint.format == 'in memory']})"
        )
    for (part, reason), sites in weights.unbounded.items():
        why = template(f"bound.{reason}").message
        lines.append(
            f"no Lipschitz bound of {part} at {len(sites)} sites, such as "
            f"{printable(sites[0])}: {why}"
        )
    if checkpoint.packs:
        lines.append(f"{checkpoint.packs} weights were read from codes and scales")
    if weights.unread:
        how = "; install the gguf package" if checkpoint.format == "gguf" else ""
        lines.append(
            f"{len(weights.unread)} tensors are packed and were not read, such as "
            f"{weights.unread[0]}{how}"
        )
    return lines


UNREAD = 0.05
"""Share of a file's bytes: with more unread, what was read is no verdict on it."""


def _judge(checkpoint: Checkpoint, weights: Measurement) -> Judge:
    """Return a judge of weights; nothing read is never healthy."""
    sizes = {name: _bytes(entry) for name, entry in checkpoint.entries.items()}
    measured = len(weights.values.get("weights.rms", {}))
    unread = len(weights.unread)
    lost = sum(sizes[name] for name in weights.unread)
    packed = not measured or lost > UNREAD * sum(sizes.values())
    coverage = {"tensors": measured, "unread": unread}
    reason = "packed" if packed else ""
    return Judge({"coverage": coverage, "reason": reason}, of="weights")


def _bytes(entry: Entry) -> int:
    return entry.numel * (1 if entry.dtype is None else entry.dtype.itemsize)
