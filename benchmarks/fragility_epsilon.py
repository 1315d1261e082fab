"""Does moving ε help? Paired seeds, same data, same start, five policies and nothing.

Each seed trains one small ViT on the 8×8 digits per policy, in fp32, and ends with the
predicted fp16 error of its logits. The published rule, BGSS and its random twin act on
the norms' ε every 5 steps; ``static`` sets 1e-3 from the start.
"""

import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.table import publish
from equipoise.lab.models import ViT, ViTConfig
from equipoise.numerics.formats import FORMATS
from equipoise.precision.emulation import Storage
from equipoise.precision.prediction import predicted
from equipoise.precision.published import lab_names, published_blocks
from equipoise.remedies.bgss import Bgss
from equipoise.remedies.epsilon import (
    Epsilon,
    NormState,
    epsilons,
    noise_rule,
    published_rule,
)

HALF = FORMATS["fp16"]
STEPS, EVERY, SEEDS = 40, 5, 10
Policy = Callable[[nn.Module, Tensor, int], int]


def states(model: nn.Module, x: Tensor) -> dict[str, NormState]:
    """Return what each norm is given, as the controllers want it."""
    found: dict[str, NormState] = {}
    hooks = []
    for name, eps in epsilons(model).items():

        def look(
            module: nn.Module, args: tuple[Tensor], name: str = name, eps: float = eps
        ) -> None:
            given = args[0].detach()
            found[name] = NormState(
                variance=float(given.var(-1, correction=0).median()),
                power=float(given.square().mean()),
                width=given.shape[-1],
                eps=eps,
            )

        hooks.append(model.get_submodule(name).register_forward_pre_hook(look))
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return found


def by_rule(rule: Callable[..., float]) -> Policy:
    def act(model: nn.Module, x: Tensor, step: int) -> int:
        seen = states(model, x)
        new = {name: rule(state, HALF) for name, state in seen.items()}
        changed = {name: eps for name, eps in new.items() if eps > seen[name].eps}
        if changed:
            Epsilon(values=changed).apply(model)
        return len(changed)

    return act


def static(model: nn.Module, x: Tensor, step: int) -> int:
    if step:
        return 0
    Epsilon(values=dict.fromkeys(epsilons(model), 1e-3)).apply(model)
    return len(epsilons(model))


def bgss(seed: int | None) -> Policy:
    """Return BGSS, or its random twin of equal trigger and budget when seeded."""
    controller, rng = Bgss(layers=3), torch.Generator().manual_seed(seed or 0)

    def act(model: nn.Module, x: Tensor, step: int) -> int:
        names = lab_names(heads=4, causal=False)
        blocks = list(model.blocks)
        risks = published_blocks(model, x, blocks=blocks, names=names).v2_risks
        scores = risks if seed is None else torch.rand(3, generator=rng).tolist()
        # A controller step is one look: its waiting times are counted in looks here.
        moved = controller.step(
            24 + step, total_risk=HALF.unit_roundoff * sum(risks), scores=scores
        )
        for layer, eps in moved.items():
            norms = ("attention_norm", "feedforward_norm")
            Epsilon(values={f"blocks.{layer}.{n}": eps for n in norms}).apply(model)
        return len(moved)

    return act


def trained(seed: int, policy: Policy | None) -> dict[str, float]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(digits.target)
    torch.manual_seed(seed)
    model = ViT(
        ViTConfig(width=32, depth=3, heads=4, image=8, patch=2, channels=1, classes=10)
    )
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    order = torch.Generator().manual_seed(1000 + seed)
    losses, actions = [], 0
    for step in range(STEPS):
        chosen = torch.randint(0, len(images), (32,), generator=order)
        if policy is not None and step % EVERY == 0:
            actions += policy(model, images[chosen[:16]], step)
        loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    error = predicted(model, images[:16], storage=Storage.named("fp16")).total
    tail = statistics.mean(losses[-15:])
    return {"tail loss": tail, "fp16 error": error, "actions": actions}


def policies(seed: int) -> dict[str, Policy | None]:
    return {
        "nothing": None,
        "published rule": by_rule(published_rule),
        "noise rule": by_rule(noise_rule),
        "static 1e-3": static,
        "BGSS": bgss(None),
        "random, BGSS's budget": bgss(seed + 1009),
    }


def main() -> None:
    torch.set_num_threads(1)
    runs = [
        {name: trained(seed, policy) for name, policy in policies(seed).items()}
        for seed in range(SEEDS)
    ]
    rows = []
    for name in runs[0]:
        row: dict[str, object] = {"policy": name}
        row["actions"] = statistics.mean(run[name]["actions"] for run in runs)
        for what in ("tail loss", "fp16 error"):
            gains = [run["nothing"][what] - run[name][what] for run in runs]
            row[f"{what}, improvement"] = statistics.mean(gains)
            row[f"{what}, ± SE"] = statistics.stdev(gains) / SEEDS**0.5
        rows.append(row)
    publish("fragility_epsilon", rows, seeds=SEEDS, steps=STEPS)


if __name__ == "__main__":
    main()
