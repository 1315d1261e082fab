"""Paths in declarations, followed in somebody's model."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from equipoise.anatomy.families import Block, Declaration, Fused, Layout, Paired
from equipoise.anatomy.sites import Weight


@dataclass(frozen=True, slots=True)
class Place:
    """A module under its name, among all the others."""

    name: str
    module: nn.Module
    modules: Mapping[str, nn.Module]
    """Every module of the model, by name."""

    def follow(self, path: str) -> tuple[str, nn.Module] | None:
        """Return (name, module) at a path, or None where there is nothing."""
        for choice in path.split("|"):
            name = _joined(self.name, choice)
            if name in self.modules:
                return name, self.modules[name]
        return None

    def weight(self, path: str) -> Weight | None:
        """Return the weight at a path: a module's, or a parameter of this module."""
        if _is_matrix(getattr(self.module, path, None)):
            return Weight(self.module, path)
        found = self.follow(path)
        if found is None or not _is_matrix(getattr(_base(found[1]), "weight", None)):
            return None
        return Weight(found[1], transposed=type(_base(found[1])).__name__ == "Conv1D")

    def fits(self, declaration: Declaration) -> bool:
        """Return whether this module has everything a declaration names."""
        if isinstance(declaration, Block):
            modules = (*declaration.feedforward, declaration.router)
            return all(self.follow(path) for path in modules if path)
        maps = _maps(declaration)
        return all(self.weight(path) is not None for path in maps)


def _maps(layout: Layout) -> tuple[str, ...]:
    if isinstance(layout, Fused):
        return layout.qkv, layout.o
    if isinstance(layout, Paired):
        return layout.q, layout.kv, layout.o
    return layout.q, layout.k, layout.v, layout.o


def _joined(name: str, path: str) -> str:
    while path.startswith(".."):
        name, path = name.rpartition(".")[0], path[2:]
    return f"{name}.{path}".strip(".")


def _is_matrix(weight: object) -> bool:
    return isinstance(weight, nn.Parameter) and weight.ndim == 2


def _base(module: nn.Module) -> nn.Module:
    base = getattr(module, "base_layer", None)
    return base if isinstance(base, nn.Module) else module
