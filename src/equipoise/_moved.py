"""Old dotted paths that documentation named, importable for one more release.

Each old module is an alias: importing it gives the new module itself, so classes stay
identical, and warns once with the new path. ``tests/test_documented_paths.py`` holds
the list to what README, docs and examples named before the tree was redrawn.
"""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from importlib.abc import Loader

MOVED = {
    "anatomy.unread": "watching.step.coverage",
    "claims.baek_epsilon": "claims.baek_estimators",
    "claims.baek_statistics": "claims.baek_networks",
    "claims.emadi_bounds": "claims.emadi",
    "claims.emadi_theta": "claims.emadi",
    "claims.mudarisov_gradient": "claims.mudarisov_normalisation",
    "forecast.lead_published": "forecast.lead",
    "lab.evidence": "lab.results.evidence",
    "lab.experiment": "lab.running.experiment",
    "lab.findings": "lab.studies.catalogue",
    "lab.findings.selection": "lab.studies.selection.normalisers",
    "lab.launch": "lab.training.distributed",
    "lab.publishing": "lab.results.publishing",
    "lab.runner": "lab.running.runner",
    "lab.trainer": "lab.training.trainer",
    "numerics.attention_rows": "numerics.rows.statistics",
    "numerics.balance": "numerics.rows.balance",
    "numerics.curvature": "theory.curvature",
    "numerics.fragility_kappa": "theory.fragility_bounds",
    "numerics.fragility_norm": "numerics.fragility",
    "numerics.fragility_rms": "numerics.fragility",
    "numerics.lipschitz": "theory.lipschitz",
    "numerics.loss_difference": "theory.loss_difference",
    "numerics.softmax": "theory.softmax_norms",
    "precision": "auditing.precision",
    "precision.study": "auditing.precision.study",
    "probes.histogram": "probes.attention",
    "remedies.bgss": "remedies.epsilon",
    "selection": "auditing.selection",
    "selection.study": "auditing.selection.study",
    "sharpness": "auditing.curvature",
    "sharpness.attribution": "auditing.curvature.attribution",
    "sharpness.attribution_dense": "auditing.curvature.attribution",
    "sharpness.loss_differences": "auditing.curvature.loss_differences",
}
"""Old path → new path, both below ``equipoise``."""


class _Alias:  # not a Loader of importlib.abc, whose import takes as long as ours
    def __init__(self, new: str) -> None:
        self._new = new

    def create_module(self, spec: ModuleSpec) -> None:
        """Let importlib make the empty module that is replaced."""

    def exec_module(self, module: ModuleType) -> None:
        # importlib returns what stands in sys.modules when this is over.
        sys.modules[module.__name__] = import_module(self._new)


class _MovedFinder:
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        new = MOVED.get(fullname.removeprefix("equipoise."))
        if new is None or not fullname.startswith("equipoise."):
            return None
        warnings.warn(
            f"{fullname} is now equipoise.{new}; the old path goes with the next "
            "release",
            DeprecationWarning,
            stacklevel=2,
        )
        return ModuleSpec(fullname, cast("Loader", _Alias(f"equipoise.{new}")))


def install() -> None:
    """Put the finder first: a moved package's folder must not be searched twice."""
    if not any(isinstance(finder, _MovedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _MovedFinder())
