"""The vocabulary that describes somebody else's model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

Placement = Literal["pre", "post", "sandwich", ""]


@dataclass(frozen=True, slots=True)
class Weight:
    """One projection, as rows of a module's weight: fused and transposed ones too."""

    module: nn.Module
    attribute: str = "weight"
    transposed: bool = False
    """True where the module stores (in, out), as GPT-2's Conv1D does."""
    rows: slice | tuple[int, ...] | None = None
    """Which output rows belong to this projection; all of them by default."""

    def matrix(self) -> Tensor:
        """Return the (out, in) matrix as it is now; whole only where the module is."""
        weight: Tensor = getattr(self.module, self.attribute).detach()
        weight = weight.mT if self.transposed else weight
        if self.rows is None:
            return weight
        return weight[self.rows if isinstance(self.rows, slice) else list(self.rows)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Projections:
    """The four linear maps of one attention module, and how they split into heads."""

    q: Weight
    k: Weight
    v: Weight
    o: Weight
    heads: int
    kv_heads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSite:
    """One module that calls attention."""

    name: str
    module: nn.Module
    layer: int | None = None
    projections: Projections | None = None
    declared: bool = False
    """From a family's table; otherwise guessed, or found only by its calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """Everything the probes need to know about one model instance."""

    model: nn.Module
    names: Mapping[int, str]
    """id(module) → name."""
    attention: tuple[AttentionSite, ...]
    blocks: Mapping[str, nn.Module]
    """The residual stream's stations, first to last."""
    norms: Mapping[str, nn.Module]
    routers: Mapping[str, tuple[nn.Module, int]] = field(default_factory=dict)
    """Modules whose output are a router's logits, and how many experts each picks."""
    placement: Placement = ""
    """Where the norms of a block stand; ``post`` means each closes a residual sum."""
    family: str = ""
    guessed: tuple[str, ...] = field(default=())
    """What was guessed rather than declared, in words for the user."""
    noticed: dict[str, str] = field(default_factory=dict)
    """Calls that were seen but could not be read, as they are met: name → reason."""

    def site(self, module: nn.Module) -> AttentionSite | None:
        """Return the site of a module, if it is one we expected."""
        return next((s for s in self.attention if s.module is module), None)
