"""A stability instrument for transformers.

with equipoise.watch(model, optimizer):
    train(model, optimizer)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from equipoise.integrations.registration import register
from equipoise.records import Finding, Reading

if TYPE_CHECKING:
    from equipoise.auditing.audit import Audit, audit
    from equipoise.numerics.attention_sensitivity import sensitivity
    from equipoise.numerics.rows.balance import Balance, balance
    from equipoise.numerics.spectra.estimate import Estimate
    from equipoise.planning import plan
    from equipoise.report.notebook import show
    from equipoise.store import Run, open_run
    from equipoise.watching import watch

__version__ = "0.2.0"

__all__ = [
    "Audit",
    "Balance",
    "Estimate",
    "Finding",
    "Reading",
    "Run",
    "__version__",
    "audit",
    "balance",
    "open_run",
    "plan",
    "sensitivity",
    "show",
    "watch",
]

# Resolved on first use (PEP 562): reading a run must not load torch.
_LAZY = {
    "Audit": "equipoise.auditing.audit",
    "Balance": "equipoise.numerics.rows.balance",
    "Estimate": "equipoise.numerics.spectra.estimate",
    "Run": "equipoise.store",
    "audit": "equipoise.auditing.audit",
    "balance": "equipoise.numerics.rows.balance",
    "open_run": "equipoise.store",
    "plan": "equipoise.planning",
    "sensitivity": "equipoise.numerics.attention_sensitivity",
    "show": "equipoise.report.notebook",
    "watch": "equipoise.watching",
}
register()  # report_to="equipoise" and log_with="equipoise"
_EXTRA_MODULES = {"torch", "numba", "jaxtyping", "safetensors"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'equipoise' has no attribute {name!r}")
    try:
        return getattr(import_module(_LAZY[name]), name)
    except ModuleNotFoundError as missing:
        if missing.name not in _EXTRA_MODULES:
            raise
        from equipoise.errors import MissingExtraError

        raise MissingExtraError(
            f"equipoise.{name} needs {missing.name}, which is not installed: "
            'pip install "equipoise[torch]"'
        ) from missing


def __dir__() -> list[str]:
    return sorted(__all__)
