"""Finds the routers of a mixture of experts, and the experts each one chooses from.

A router makes scores; which experts a token is given to is often decided after it, by a
bias, groups or a capacity. So the experts are part of the router's site: what they are
called with is what was chosen.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from equipoise.anatomy.sites import Router

NAMES = ("router", "gate", "gating")
PICKS = (
    *("top_k", "num_experts_per_tok", "num_selected_experts", "chosen", "moe_k"),
    *("num_experts_per_token", "top_k_experts", "moe_topk", "k"),
)
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "experts_num")


def routers(modules: Mapping[str, nn.Module]) -> dict[str, Router]:
    """Return what looks like a router: a small map beside its experts."""
    found = {}
    for name, module in modules.items():
        home, _, own = name.rpartition(".")
        if own in NAMES and home in modules and experts_of(modules[home]):
            found[name] = router(module, modules[home])
    return found


def router(module: nn.Module, home: nn.Module) -> Router:
    """Return the router of a mixture, with its experts and its balancing bias."""
    experts, count = _expert_calls(experts_of(home))
    return Router(
        module=module,
        home=home,
        picks=picks(home, module),
        experts=experts,
        count=count,
        bias=_bias(home, experts, count),
    )


def experts_of(home: nn.Module) -> nn.Module | None:
    """Return the child that holds the routed experts; shared ones see every token."""
    for name, child in home.named_children():
        is_shared = "shared" in name or "gate" in name
        if not is_shared and ("expert" in name or "Expert" in type(child).__name__):
            return child
    return None


def _expert_calls(experts: nn.Module | None) -> tuple[tuple[nn.Module, ...], int]:
    """Return the modules that are called with tokens, and how many experts they are."""
    if experts is None:
        return (), 0
    if isinstance(experts, nn.ModuleList | nn.ModuleDict):
        each = tuple(m for _, m in experts.named_children())
        return (experts, *each), len(each)
    inside = [m for m in experts.children() if isinstance(m, nn.ModuleList)]
    if len(inside) == 1 and len(inside[0]) > 1:
        return (experts, *inside[0]), len(inside[0])
    return (experts,), _count(experts)


def _count(experts: nn.Module) -> int:
    """Return how many experts one module holds; 0 where nothing tells."""
    for name in COUNTS:
        if isinstance(value := getattr(experts, name, None), int):
            return value
    stacked = [p.shape[0] for p in experts.parameters() if p.ndim == 3]
    return stacked[0] if stacked else 0


def picks(*owners: nn.Module) -> int:
    """Return how many experts a router picks per token; 0 where no option tells."""
    for owner in owners:
        for holder in (owner, getattr(owner, "config", None)):
            for name in PICKS:
                if isinstance(value := getattr(holder, name, None), int):
                    return value
    return 0


def _bias(
    home: nn.Module, experts: tuple[nn.Module, ...], count: int
) -> tuple[nn.Module, str] | None:
    """Return where a bias that only balances is stored: not that of a linear map."""
    inside = {id(m) for expert in experts for m in expert.modules()}
    for module in home.modules():
        own = {**module._parameters, **module._buffers}
        for name, tensor in own.items():
            balances = "bias" in name and name != "bias" and id(module) not in inside
            if balances and isinstance(tensor, Tensor) and tensor.numel() == count > 1:
                return module, name
    return None
