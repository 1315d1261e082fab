"""What could not be read, by name, with the reason and the next thing to try."""

import inspect
import sys
from collections.abc import Container, Mapping
from types import CodeType

from torch import nn

from equipoise.anatomy.sites import Anatomy

# Attention implementations of Hugging Face whose kernels hand no scores to anybody.
FLASH = ("flash", "sage", "paged", "kernels-community")
FOREIGN = ("flash_attn", "xformers", "sageattention", "transformer_engine", "fla")
SWITCH = "choose sdpa or eager attention to read it"


def unread(anatomy: Anatomy, heard: Container[str]) -> dict[str, str]:
    """Return every attention site that was not heard: name → why.

    ``heard`` are the names of sites whose calls were read in a step. Calls that were
    seen outside any known site, and could not be read, are listed as well.
    """
    silent = [site for site in anatomy.attention if site.name not in heard]
    reasons = {site.name: _reason(site.module) for site in silent}
    noticed = {n: why for n, why in anatomy.noticed.items() if n not in heard}
    return {**reasons, **noticed}


def _reason(module: nn.Module) -> str:
    implementation = _implementation(module)
    if implementation.startswith(FLASH):
        return f"attn_implementation={implementation!r} returns no scores; {SWITCH}"
    kernel = _foreign(type(module).forward.__code__, _globals(module))
    if kernel:
        return f"it calls {kernel}, which returns no scores; {SWITCH}"
    if "linear" in f"{type(module).__name__} {_kind(module)}".lower():
        return "linear attention has no softmax over scores"
    return (
        "no softmax and no fused attention was called while it ran: linear attention, "
        "a softmax written out by hand, code compiled before it was watched, or a "
        "module that took no part in this step"
    )


def _implementation(module: nn.Module) -> str:
    return str(getattr(getattr(module, "config", None), "_attn_implementation", ""))


def _kind(module: nn.Module) -> str:
    """Return what a module's configuration says its attention is, as our lab's does."""
    return str(getattr(getattr(module, "config", None), "attention", ""))


def _globals(module: nn.Module) -> Mapping[str, object]:
    home = inspect.getmodule(type(module)) or sys.modules.get(type(module).__module__)
    return vars(home) if home is not None else {}


def _foreign(code: CodeType, names: Mapping[str, object]) -> str:
    """Return the foreign kernel a function names, by where its globals come from."""
    for name in code.co_names:
        home = str(getattr(names.get(name), "__module__", "") or "")
        if home.partition(".")[0] in FOREIGN:
            return f"{home}.{name}"
    return ""
