"""What the interceptor hears of a specimen, beside what the reference says."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.discovery import anatomy_of
from equipoise.anatomy.interception import Interceptor
from equipoise.anatomy.sites import Anatomy, Gaps
from equipoise.numerics.rows.statistics import row_statistics
from tests.oracles import attention as oracle
from tests.zoo.specimens import Specimen, padding


@dataclass
class Read:
    """One attention call as it was read."""

    site: str
    kind: str
    cross: bool
    rows: oracle.Rows


@dataclass
class Captured:
    """Everything captured in one forward pass."""

    anatomy: Anatomy
    calls: list[Read] = field(default_factory=list)
    output: Any = None
    gaps: Gaps = field(default_factory=Gaps)

    def __call__(self, call: AttentionCall) -> None:
        name = self.anatomy.names[id(call.module)] if call.module else ""
        self.calls.append(Read(name, call.kind, call.cross, _rows(call)))


def _rows(call: AttentionCall) -> oracle.Rows:
    with torch.no_grad():
        blocks = [row_statistics(scores) for _, scores in call.blocks()]
        visible, lower, entropy, logit = (
            torch.cat([getattr(block, name) for block in blocks], -1)
            for name in ("visible", "theta_lower", "entropy", "max_logit")
        )
        counted = (visible >= 2) & call.counted_BQ()[:, None]
    nan = float("nan")
    values = (torch.where(counted, v.double(), nan) for v in (lower, entropy, logit))
    return oracle.Rows(*values, counted)


def capture(model: nn.Module, batch: dict[str, Any]) -> Captured:
    """Run the model once with the interceptor on."""
    hearing = Captured(anatomy_of(model))
    with Interceptor(hearing.anatomy, hearing, gaps=hearing.gaps):
        hearing.output = model(**batch)
    return hearing


def expected(specimen: Specimen, model: nn.Module, batch: Any) -> list[oracle.Rows]:
    """Return the reference's rows, call by call."""
    real = padding(specimen, batch)
    found = oracle.scores(model, batch, heads=4)
    return [
        oracle.rows(z, real if _own(specimen, i, z, real) else None)
        for i, z in enumerate(found)
    ]


def _own(specimen: Specimen, call: int, z: Tensor, real: Tensor | None) -> bool:
    same = real is not None and z.shape[-2] == real.shape[-1]
    return same and call not in specimen.crossed


def deviation(read: oracle.Rows, truth: oracle.Rows) -> dict[str, float]:
    """Return the largest difference of each quantity over the rows that count."""
    assert torch.equal(read.counted, truth.counted)
    here = truth.counted
    return {
        name: float((getattr(read, name) - getattr(truth, name))[here].abs().max())
        for name in ("theta", "entropy", "max_logit")
    }
