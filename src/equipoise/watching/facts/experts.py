"""Facts of mixtures: how many tokens each expert was given in a sampled pass."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy.sites import Anatomy, Reason
from equipoise.probes.protocols import Emit, Guarded, How
from equipoise.probes.router import RouterLoad


@dataclass(slots=True)
class ExpertFacts:
    """State tokens per expert and router, as the model used them."""

    name: str = "experts"
    _load: dict[str, Tensor] = field(default_factory=dict)
    _tokens: dict[str, Tensor] = field(default_factory=dict)
    _bias: set[str] = field(default_factory=set)

    def begin_step(self, step: int) -> None:
        """Forget the last sampled step."""
        self._load, self._tokens, self._bias = {}, {}, set()

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        if anatomy.routers:
            yield from RouterLoad().attach(anatomy, self, guarded)

    def __call__(
        self, site: str, quantity: str, values: Tensor, *, how: How = "last"
    ) -> None:
        """Take what the router's reader emits."""
        if quantity == "router.load":
            self._load[site] = values.detach()
        elif quantity == "router.tokens":
            self._tokens[site] = values.detach()
        elif quantity == "router.bias":
            self._bias.add(site)

    def not_read(self, site: str, why: Reason) -> None:
        """Nothing: the router's own reader says so."""

    def facts(self) -> Mapping[str, Any]:
        """Return the tokens of each expert, by router."""
        routers = {
            site: {
                "tokens": load_E * self._tokens[site],
                "balanced_by_bias": site in self._bias,
            }
            for site, load_E in self._load.items()
            if site in self._tokens
        }
        return {"routers": routers} if routers else {}
