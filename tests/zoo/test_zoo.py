"""Every family, every implementation: all attention is read, and read right."""

import pytest
import torch

from tests.zoo.further import FURTHER
from tests.zoo.reading import capture, deviation, expected
from tests.zoo.specimens import Specimen
from tests.zoo.wider import COLLECTION

CASES = [(s, i) for s in COLLECTION for i in s.implementations]
# One way each: the page of the zoo, made by ./dev docs, measures them all.
CASES += [(s, s.implementations[0]) for s in FURTHER]
# The subject runs in float32, its reference in float64: what is left is the rounding of
# two layers, some tens of ε; a wrong mask or scale is off by 1e-2. The page of the zoo
# tells 9e-6 at worst; torch's plainest kernels, as another CPU may have them, 1.4e-5.
TOLERANCE = 5e-5


def plainest(specimen: Specimen, implementation: str) -> str:
    """The reference takes the road on which every softmax can be written down."""
    plain = [i for i in ("eager", "training") if i in specimen.implementations]
    return plain[0] if plain else implementation


@pytest.mark.parametrize(
    ("specimen", "implementation"), CASES, ids=lambda v: getattr(v, "name", v)
)
def test_reads_what_the_reference_reads(
    specimen: Specimen, implementation: str
) -> None:
    model, batch = specimen.build(implementation), specimen.batch()
    with torch.set_grad_enabled(model.training):
        captured = capture(model, batch)
        truth = expected(
            specimen, specimen.build(plainest(specimen, implementation)), batch
        )
    assert len(captured.calls) == len(truth) == specimen.calls
    assert not captured.gaps.unread
    worst = [deviation(r.rows, t) for r, t in zip(captured.calls, truth, strict=True)]
    assert max(max(w.values()) for w in worst) < TOLERANCE, worst


@pytest.mark.parametrize("specimen", COLLECTION, ids=lambda s: s.name)
def test_the_family_is_recognised(specimen: Specimen) -> None:
    model = specimen.build(specimen.implementations[0])
    captured = capture(model, specimen.batch())
    sites = {site.name: site for site in captured.anatomy.attention}
    if specimen.declared:
        assert {call.site for call in captured.calls} == sites.keys()
        assert all(s.declared and s.projections for s in sites.values())
        assert captured.anatomy.feedforwards
    assert captured.anatomy.blocks
    crossed = [i for i, call in enumerate(captured.calls) if call.cross]
    assert tuple(crossed) == specimen.crossed


def test_at_least_twenty_five_classes() -> None:
    assert len({specimen.name for specimen in COLLECTION}) >= 25
