"""The evidence that a plan quotes is what the committed experiments say."""

import json
from pathlib import Path

from equipoise.planning import plan
from equipoise.planning.evidence import DEEPNORM_MINUS_POST, DEEPNORM_MINUS_PRE
from equipoise_lab.results.statistics import paired

DOCS = Path(__file__).parents[2] / "docs"


def test_deepnorm_is_measured_here() -> None:
    """Numbers come from the committed runs, by the statistics of the lab."""
    runs = json.loads((DOCS / "results" / "prepost" / "raw.json").read_text())["runs"]
    losses = {
        arm: [found[seed]["validation"] for seed in sorted(found)]
        for arm, found in runs.items()
    }
    pairs = {"pre": DEEPNORM_MINUS_PRE, "post": DEEPNORM_MINUS_POST}
    for arm, noted in pairs.items():
        found = paired(losses["deepnorm"], losses[arm])
        shown = [float(f"{x:.3g}") for x in (found.mean, found.low, found.high)]
        assert shown == [noted.found, noted.low, noted.high]
        assert noted.high < 0
    for residual, name in (
        ("deepnorm", "residual.branch"),
        ("deepnorm-original", "residual.skip"),
    ):
        made = {s.name: s for s in plan(24, 64, 4, residual=residual)}
        assert made[name].evidence == "measured here"
        assert "-0.087 nats [-0.102, -0.073]" in made[name].because
        # The experiment left the gains at 1.
        assert made["init.gain.v"].evidence == "published only"
