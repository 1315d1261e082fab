"""The laboratory uses the modules of the instrument that are listed here, no others."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "equipoise_lab"

# What a user may import; the commands are built with what `equipoise`'s own are.
USES = """
equipoise
equipoise.anatomy equipoise.anatomy.calls equipoise.anatomy.discovery
equipoise.anatomy.interception equipoise.anatomy.model_copy equipoise.anatomy.sites
equipoise.auditing.curvature equipoise.auditing.curvature.objective
equipoise.auditing.curvature.operator equipoise.auditing.precision.emulation
equipoise.auditing.precision.prediction equipoise.auditing.subject
equipoise.cli equipoise.cli.arguments equipoise.cli.progress
equipoise.errors
equipoise.numerics.attention_sensitivity equipoise.numerics.formats
equipoise.integrations.hf equipoise.integrations.lightning
equipoise.numerics.fragility equipoise.numerics.hessian_products
equipoise.numerics.normalisers equipoise.numerics.normalisers.closed_form
equipoise.numerics.norms equipoise.numerics.rounding equipoise.numerics.rows.balance
equipoise.numerics.rows.finite_step
equipoise.numerics.rows.statistics equipoise.numerics.scaling
equipoise.judging.checks.checker equipoise.judging.facts
equipoise.judging.judge equipoise.judging.rules
equipoise.numerics.selection equipoise.numerics.spectra.estimate
equipoise.probes.logits
equipoise.records
equipoise.remedies.epsilon equipoise.remedies.normaliser equipoise.remedies.temperature
equipoise.report.html equipoise.report.offline_pages equipoise.report.report_model
equipoise.store
equipoise.theory equipoise.theory.activations equipoise.theory.baek_v1
equipoise.theory.baek_v2 equipoise.theory.curvature.norm
equipoise.theory.curvature.softmax equipoise.theory.lipschitz.bound
equipoise.theory.lipschitz.forward equipoise.theory.lipschitz.heads
equipoise.theory.lipschitz.local equipoise.theory.softmax_norms
equipoise.watching equipoise.watching.options
"""

# Folder or file → what of the laboratory it may import.
BELOW = {
    "options": "",
    "theory": "",
    "data": "options",
    "models": "options",
    "training": "options data models",
    "running": "options data models training results studies",
    "results": "options data models training running studies",
    "studies": "options data models training running results theory",
    "claims": "options data models training running results studies theory",
    "storms": "options data models training running",
    "commands": "options data running results studies storms claims",
}


def imported(path: Path) -> set[str]:
    """Return the modules that a file imports, in functions and for types too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {
        a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def part(module: str) -> str:
    return (module.split(".") + [""])[1]


FILES = {
    ".".join(path.relative_to(SRC.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    ): path
    for path in sorted(SRC.rglob("*.py"))
}


def test_the_instrument_is_used_by_its_documented_modules() -> None:
    found = {name for path in FILES.values() for name in imported(path)}
    used = {name for name in found if name.partition(".")[0] == "equipoise"}
    assert used == set(USES.split())


def test_imports_point_down() -> None:
    for name, path in FILES.items():
        here = part(name)
        found = {part(n) for n in imported(path) if n.startswith("equipoise_lab.")}
        assert found <= {here, *BELOW.get(here, "").split()}, name


def test_no_import_cycle() -> None:
    graph = {}
    for name, path in FILES.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= inside & set(FILES) or {str(node.module)}
        graph[name] = found & set(FILES) - {name, "equipoise_lab"}
    TopologicalSorter(graph).prepare()
