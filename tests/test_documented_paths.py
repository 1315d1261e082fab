"""Every dotted path that a document names imports; old ones for one more release."""

import ast
import re
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from equipoise._moved import MOVED

ROOT = Path(__file__).parents[1]
DOTTED = re.compile(r"\bequipoise(?:\.[A-Za-z_]\w*)+")
FENCE = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
# Names of ours that are no Python paths: an entry point's group, a configuration file.
NOT_PYTHON = {"equipoise.families", "equipoise.rules", "equipoise.toml"}


def imported(code: str) -> set[str]:
    """Return what a piece of code imports of ours, one dotted path per name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {path for path in found if path.startswith("equipoise.")}


def named_in(text: str) -> set[str]:
    return set(DOTTED.findall(text)) | {
        path for code in FENCE.findall(text) for path in imported(code)
    }


def documented() -> set[str]:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    # The changelog tells the past: what it names may be gone.
    texts = [p.read_text(encoding="utf-8") for p in pages if p.name != "CHANGELOG.md"]
    found = {path for text in texts for path in named_in(text)}
    for example in ROOT.glob("examples/*.py"):
        found |= imported(example.read_text(encoding="utf-8"))
    return found - NOT_PYTHON


def resolved(path: str) -> object:
    """Import the longest module in a dotted path, then follow its attributes."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        try:
            module: ModuleType = import_module(name)
        except ModuleNotFoundError as missing:
            if missing.name != name:
                raise
            continue
        found: object = module
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(path)


@pytest.mark.parametrize("path", sorted(documented()))
def test_a_documented_path_imports(path: str) -> None:
    resolved(path)


FILE = re.compile(r"`((?:tests|benchmarks|docs|src|examples)/[\w./-]+)`")


def missing_files(text: str) -> list[str]:
    return [name for name in FILE.findall(text) if not (ROOT / name).exists()]


def test_a_file_that_a_document_names_exists() -> None:
    """A reader is sent to tests as proof: seven had moved when this was written."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    texts = {p: p.read_text(encoding="utf-8") for p in pages}
    found = {p.name: missing_files(t) for p, t in texts.items()}
    del found["CHANGELOG.md"]
    assert {name: files for name, files in found.items() if files} == {}
    assert missing_files("`tests/no_such.py` and `docs/README.md`") == [
        "tests/no_such.py"
    ]


BEFORE = """
equipoise.anatomy.families
equipoise.anatomy.families.Block
equipoise.anatomy.families.Fused
equipoise.anatomy.families.Paired
equipoise.anatomy.families.Separate
equipoise.anatomy.families.family
equipoise.anatomy.unread.unread
equipoise.balance
equipoise.claims
equipoise.claims.baek_epsilon.intervention_never_fires
equipoise.claims.baek_heads
equipoise.claims.baek_heads.epsilon_does_not_set_the_error
equipoise.claims.baek_heads.tf32_reference_understates
equipoise.claims.baek_statistics
equipoise.claims.emadi_bounds.measured_theta_is_local
equipoise.claims.emadi_theta
equipoise.claims.mudarisov_distance
equipoise.claims.mudarisov_distance.critical_fraction
equipoise.claims.mudarisov_distance.theorem_1
equipoise.claims.mudarisov_gradient
equipoise.claims.petrov_attention
equipoise.judging.lead.lead
equipoise.judging.lead_published.published_lead
equipoise.integrations.hf.EquipoiseCallback
equipoise.integrations.lightning.EquipoiseCallback
equipoise.lab.data.Windows
equipoise.lab.data.embedded
equipoise.lab.experiment
equipoise.lab.experiment.Arm
equipoise.lab.experiment.Experiment
equipoise.lab.launch
equipoise.lab.models
equipoise.lab.models.GPT
equipoise.lab.models.GPTConfig
equipoise.lab.models.gpt.GPT
equipoise.lab.models.gpt.GPTConfig
equipoise.lab.results
equipoise.lab.results.results
equipoise.lab.runner
equipoise.lab.runner.run_experiment
equipoise.lab.trainer.Trainer
equipoise.lab.training
equipoise.lab.training.TrainOptions
equipoise.numerics.attention_rows.row_statistics
equipoise.numerics.curvature
equipoise.numerics.fragility_kappa.conditions
equipoise.numerics.fragility_norm
equipoise.numerics.fragility_rms.head_error
equipoise.numerics.lipschitz
equipoise.numerics.loss_difference
equipoise.numerics.normalisers
equipoise.numerics.norms
equipoise.numerics.scaling.common_gain
equipoise.numerics.selection
equipoise.numerics.softmax
equipoise.numerics.spectra
equipoise.open_run
equipoise.plan
equipoise.precision.study.study
equipoise.probes.histogram
equipoise.records
equipoise.records.Reading
equipoise.records.RunInfo
equipoise.remedies.bgss.Bgss
equipoise.remedies.epsilon.Epsilon
equipoise.remedies.normaliser
equipoise.remedies.normaliser.NormaliserSwap
equipoise.remedies.normaliser.learnt_parameters
equipoise.selection.study
equipoise.sensitivity
equipoise.sharpness.attributed
equipoise.sharpness.attribution.attributed
equipoise.sharpness.attribution_dense.node_hessians
equipoise.sharpness.eigenvalues
equipoise.sharpness.hessian
equipoise.sharpness.loss_differences
equipoise.store
equipoise.store.RunWriter
equipoise.store.open_run
equipoise.watch
"""
"""What README, docs and examples named at dc3c61d, before the tree was redrawn."""


@pytest.mark.parametrize("path", BEFORE.split())
def test_a_path_documented_before_still_imports(path: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        resolved(path)


def test_an_old_path_is_the_new_module_and_warns_once() -> None:
    code = """
import warnings
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import equipoise.lab.trainer as old
    import equipoise.lab.trainer
import equipoise.lab.training.trainer as new
assert old is new
assert [str(w.message) for w in seen if "equipoise" in str(w.message)] == [
    "equipoise.lab.trainer is now equipoise.lab.training.trainer; the old path goes "
    "with the next release"
], seen
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("old", sorted(MOVED))
def test_a_moved_path_leads_to_a_module_and_hides_none(old: str) -> None:
    place = ROOT / "src" / "equipoise" / old.replace(".", "/")
    assert not place.with_suffix(".py").exists(), "the alias hides a module"
    assert isinstance(import_module(f"equipoise.{MOVED[old]}"), ModuleType)
