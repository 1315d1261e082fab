"""Attack every Lipschitz bound an audit prints: gradient ascent against the formula.

``python -m benchmarks.bounds_attack [WORD …]`` (names of models; all by default). Tiny
models of the zoo, eager, in float64, with random, scaled and aligned weights. What
feeds a module is found by running the model: the norm whose output it reads. Tokens
before that norm are free; the gain of the module's Jacobian at the norm's real output
is maximised by ascent, over tokens, directions and query. Nothing of the bound's
formula is used. A bound below what was attained is violated; the bar is none.
"""

import math
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from os.path import commonprefix
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig

from benchmarks.table import publish
from equipoise.auditing.weights.blocks import BLOCKS
from equipoise.auditing.weights.bounds import described
from equipoise.auditing.weights.entries import in_memory
from equipoise.auditing.weights.layout import AttentionLayout, attentions
from equipoise.auditing.weights.measures import measure
from tests.zoo.specimens import Specimen

STARTS, STEPS, TURNS = 4, 12, 4
Module = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Caught:
    """One module as the model called it, and the norm its tokens came from."""

    module: Module
    norm: nn.Module
    before: Tensor
    """What the norm was given."""


def random_weights(model: nn.Module, rng: torch.Generator) -> None:
    """Give γ, β and biases numbers of order one; maps stay as they were drawn."""
    for module in model.modules():
        norm = "norm" in type(module).__name__.lower()
        for name, parameter in module.named_parameters(recurse=False):
            drawn = torch.randn(parameter.shape, generator=rng, dtype=torch.float64)
            if norm and name == "weight":
                parameter.data.add_(0.3 * drawn)
            elif parameter.dim() == 1:
                parameter.data.copy_(drawn)


def scaled_weights(model: nn.Module, rng: torch.Generator) -> None:
    """Queries and keys times 20, feed-forward nets times 4, γ 1/10, β and biases ±1."""
    ends = ("q", "k", "v", "o", "qkv")
    for name, module in model.named_modules():
        norm = "norm" in type(module).__name__.lower()
        part = name.rpartition(".")[2]
        attends = "attn" in part or "qkv" in part or part.split("_")[0] in ends
        for kind, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 1:
                signs = torch.rand(parameter.shape, generator=rng) < 0.5
                size = 0.1 if norm and kind == "weight" else 1.0
                parameter.data.copy_(size * (1 - 2.0 * signs.double()))
            elif parameter.dim() == 2 and "embed" not in name:
                wide = attends or part in ("query", "key", "query_key_value")
                parameter.data.mul_(20 if wide else 4)


def aligned_weights(
    model: nn.Module, rng: torch.Generator, *, share: float = 1.0
) -> None:
    """Every map rank one along one token direction, so that norms of products add up.

    ``share`` scales them where γ or the scores' scale is larger than usual.
    """
    checkpoint = in_memory(model, name="model")
    state = dict(model.named_parameters())
    for attention in attentions(checkpoint):
        out, q = state[attention.o.tensor].data, attention.q
        width = q.of(state[q.tensor].data).shape[1]
        e_D = direction(width)
        head = q.of(state[q.tensor].data).shape[0] // (attention.heads or 1)
        # Logits of order one at tokens as long as a norm leaves them.
        size = share * (math.sqrt(head) / width) ** 0.5
        for letter in "qkv":
            part = getattr(attention, letter)
            whole = state[part.tensor].data
            rows = whole.mT if part.transposed else whole
            rows.copy_((size / math.sqrt(head) * e_D).expand_as(rows))
        matrix = out.mT if attention.o.transposed else out
        inner = matrix.shape[1]
        matrix.copy_(e_D[:, None].expand_as(matrix) / math.sqrt(inner))
        for name in attention.tensors:
            bias = state.get(name.removesuffix("weight") + "bias")
            if bias is not None and bias.dim() == 1:
                bias.data.zero_()
        block = described(checkpoint, attention.site)
        stem = attention.site[: -len(block.attention) - 1] if block else ""
        _align_feedforward(state, stem, block.maps if block else (), e_D)


def direction(width: int) -> Tensor:
    """Return a unit token direction of mean 0: LayerNorm leaves it."""
    e_D = torch.ones(width, dtype=torch.float64)
    e_D[1::2] = -1
    e_D -= e_D.mean()
    return torch.nn.functional.normalize(e_D, dim=0)


def _align_feedforward(
    state: dict[str, Any], stem: str, maps: tuple[str, ...], e_D: Tensor
) -> None:
    for path in maps:
        weight = state.get(f"{stem}.{path}.weight")
        if weight is None or len(e_D) not in weight.shape:
            continue
        w, last = weight.data, path == maps[-1]
        reads = w.shape[1] == len(e_D) and not last
        if w.shape[0] == w.shape[1] or w.shape[int(reads)] != len(e_D):
            continue
        other = w.shape[1 - int(reads)]
        e = e_D if reads else e_D[:, None]
        w.copy_(2 * e.expand_as(w) / math.sqrt(other))


WEIGHTS: dict[str, Callable[[nn.Module, torch.Generator], None]] = {
    "random": random_weights,
    "scaled": scaled_weights,
    "aligned": aligned_weights,
    "aligned, half": partial(aligned_weights, share=0.5),
}


def specimens() -> list[Specimen]:
    """Return the zoo, one specimen for each type of block."""
    from tests.zoo.further import EVERYTHING

    return [s for s in EVERYTHING if not s.name.startswith(("nn.", "lab", "nano"))]


class Listener:
    """Every norm's output of one forward pass, and calls of the modules asked for."""

    def __init__(self, model: nn.Module, wanted: set[str]) -> None:
        self.norms: list[tuple[nn.Module, Tensor, Tensor]] = []
        self.calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        for name, module in model.named_modules():
            if "norm" in type(module).__name__.lower():
                module.register_forward_hook(self._norm)
            if name in wanted:
                module.register_forward_pre_hook(self._call(name), with_kwargs=True)

    def _norm(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if isinstance(out, Tensor) and args:
            self.norms.append((module, args[0], out))

    def _call(self, name: str) -> Any:
        def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.calls.setdefault(name, (args, dict(kwargs)))

        return keep

    def before(self, tokens: Tensor) -> tuple[nn.Module, Tensor] | None:
        """Return the norm whose output these tokens are."""
        for module, given, out in self.norms:
            if out.data_ptr() == tokens.data_ptr() and out.shape == tokens.shape:
                return module, given
        return None


def caught(model: nn.Module, batch: dict[str, Any], name: str) -> Caught | None:
    """Run the model once; return the module of this name and its norm."""
    parts = dict(model.named_modules())
    listener = Listener(model, {name})
    with torch.no_grad():
        model(**batch)
    for module in parts.values():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        module._forward_pre_hooks_with_kwargs.clear()
    if name not in listener.calls:
        return None
    args, kwargs = listener.calls[name]
    args = tuple(None if _is_cache(v) else v for v in args)
    kwargs = {k: None if _is_cache(v) else v for k, v in kwargs.items()}
    keyed = "" if args else next(k for k, v in kwargs.items() if isinstance(v, Tensor))
    tokens = kwargs[keyed] if keyed else args[0]
    origin = listener.before(tokens)
    if origin is None:
        return None

    def call(u: Tensor) -> Tensor:
        again = ((), {**kwargs, keyed: u}) if keyed else ((u, *args[1:]), kwargs)
        found = parts[name](*again[0], **again[1])
        return found if isinstance(found, Tensor) else found[0]

    return Caught(module=call, norm=origin[0], before=origin[1])


def _is_cache(value: Any) -> bool:
    """Say whether an argument remembers keys: called again it would see them twice."""
    return type(value).__name__.endswith("Cache")


def then(first: Module, *others: Module) -> Module:
    def run(u: Tensor) -> Tensor:
        for module in (first, *others):
            u = module(u)
        return u

    return run


def attention_of(
    model: nn.Module, batch: dict[str, Any], attention: AttentionLayout
) -> Caught | None:
    """Return attention with its output projection, inside the module or after it."""
    found, out = caught(model, batch, attention.site), attention.o.tensor
    if found is None or out.startswith(f"{attention.site}."):
        return found
    last = model.get_submodule(out.removesuffix(".weight"))
    return Caught(module=then(found.module, last), norm=found.norm, before=found.before)


def feedforward_of(
    model: nn.Module, batch: dict[str, Any], block: str, paths: tuple[str, ...]
) -> Caught | None:
    """Return the net from its norm to its last map."""
    parts = dict(model.named_modules())
    names = [
        next(f"{block}.{p}" for p in path.split("|") if f"{block}.{p}" in parts)
        for path in paths
    ]
    whole = commonprefix([n.split(".") for n in names])
    home = ".".join(whole)
    if home != block:
        return caught(model, batch, home)
    found, last = caught(model, batch, names[0]), parts[names[-1]]
    if found is None:
        found = caught(model, batch, names[0].rpartition(".")[0])
    assert found is not None
    inner = parts[block]
    act = getattr(inner, "activation_fn", None)
    if act is None:  # BERT's: the activation is in a module around the first map
        act = parts[names[0].rpartition(".")[0]].intermediate_act_fn
    return Caught(
        module=then(found.module, act, last), norm=found.norm, before=found.before
    )


def attained(found: Caught, rng: torch.Generator, *, starts: int = STARTS) -> float:
    """Return the largest gain of the Jacobian at the norm's outputs that was found."""
    return max(_climbed(found, x) for x in _starts(found.before, rng, starts))


def _starts(like: Tensor, rng: torch.Generator, count: int) -> Iterator[Tensor]:
    for n in range(count):
        noise = torch.randn(like.shape, generator=rng, dtype=torch.float64)
        if n % 4 == 1:  # one channel holds all
            place = int(torch.randint(like.shape[-1], (), generator=rng))
            noise[..., place] += 30 * noise[..., :1].sign()[..., 0]
        if n % 4 == 2:
            spread = torch.randn(like.shape[:-1], generator=rng, dtype=torch.float64)
            noise = 0.1 * noise + 3 * spread[..., None].sign() * direction(
                like.shape[-1]
            )
        if n % 4 == 3:  # one token for all but one
            noise[..., 1:, :] = 0.1 * noise[..., 1:, :] + noise[..., :1, :]
        yield noise


def _climbed(found: Caught, x: Tensor) -> float:
    best, rate = 0.0, 0.3
    for _ in range(STEPS):
        u = found.norm(x).detach()
        value, v, y = _gain(found.module, u)
        best = max(best, value)
        slope = _slope(found, x, v, y)
        length = slope.norm()
        if not (length.isfinite() and length > 0):
            break
        x = x + rate * x.norm() * slope / length
        rate *= 0.85
    return best


def _gain(module: Module, u: Tensor) -> tuple[float, Tensor, Tensor]:
    """Return max_i ‖(Jv)_i‖ over ‖v_j‖ ≤ 1 by turns, v, and the row's unit output."""
    u = u.detach().requires_grad_()
    with torch.enable_grad():
        out = module(u)
        # Jv is the derivative of Jᵀy by y: two passes backward, no forward mode.
        y0 = torch.zeros_like(out, requires_grad=True)
        (pulled,) = torch.autograd.grad(out, u, y0, create_graph=True)
    start = torch.sin(1 + torch.arange(u.numel())).to(u).view_as(u)
    v = torch.nn.functional.normalize(start, dim=-1)
    best, found = 0.0, (v, torch.zeros_like(out))
    for _ in range(TURNS):
        (moved,) = torch.autograd.grad(pulled, y0, v, retain_graph=True)
        norms = moved.norm(dim=-1)
        place = int(norms.argmax())
        y = torch.zeros_like(out).flatten(0, -2)
        y[place] = torch.nn.functional.normalize(moved.flatten(0, -2)[place], dim=-1)
        y = y.view_as(out)
        if float(norms.max()) > best:
            best, found = float(norms.max()), (v, y)
        (back,) = torch.autograd.grad(out, u, y, retain_graph=True)
        v = torch.nn.functional.normalize(back, dim=-1)
    return best, *found


def _slope(found: Caught, x: Tensor, v: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of yᵀJ(norm(x))v by x."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        u = found.norm(x)
        out = found.module(u)
        (back,) = torch.autograd.grad(out, u, y, create_graph=True)
        value = (back * v).sum()
        if not value.requires_grad:
            return torch.zeros_like(x)
        (slope,) = torch.autograd.grad(value, x, allow_unused=True)
    return torch.zeros_like(x) if slope is None else slope.detach()


def rows_of(
    specimen: Specimen, kinds: tuple[str, ...] = tuple(WEIGHTS), starts: int = STARTS
) -> Iterator[dict[str, Any]]:
    """Yield one row for each bound of a model, and for each that there is not."""
    for kind in kinds:
        rng = torch.Generator().manual_seed(0)
        model = specimen.build(specimen.implementations[-1]).double().eval()
        if isinstance(config := getattr(model, "config", None), PretrainedConfig):
            config.use_cache = False
        with torch.no_grad():
            WEIGHTS[kind](model, rng)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        batch = {
            k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
            for k, v in specimen.batch().items()
        }
        yield from _rows(specimen.name, kind, (model, batch), starts)


def _rows(
    name: str, kind: str, given: tuple[nn.Module, dict[str, Any]], starts: int
) -> Iterator[dict[str, Any]]:
    model, batch = given
    checkpoint = in_memory(model, name=name)
    found = measure(checkpoint)
    sites = {a.site: a for a in attentions(checkpoint)}
    if not sites:
        none = {"part": "attention", "no bound": "not_recognised"}
        yield {"model": name, "weights": kind, **none}
    for (part, reason), places in found.unbounded.items():
        yield {
            "model": name,
            "weights": kind,
            "part": part,
            "sites": len(places),
            "no bound": reason,
        }
    for part in ("attention", "feedforward"):
        for site, (log,) in found.values.get(f"weights.bound.{part}", {}).items():
            if part == "attention":
                module = attention_of(model, batch, sites[site])
            else:
                paths = BLOCKS[_type(checkpoint.config, site)].maps
                module = feedforward_of(model, batch, site, paths)
            rng = torch.Generator().manual_seed(1)
            gain = math.nan if module is None else attained(module, rng, starts=starts)
            yield {
                "model": name,
                "weights": kind,
                "part": part,
                "site": site,
                "bound": 10**log,
                "attained": gain,
                "ratio": 10**log / gain if gain else math.inf,
                "violated": not gain <= 10**log,
            }


def _type(config: Any, site: str) -> str:
    from equipoise.auditing.weights.layout import config_for

    return str(config_for(config, site).get("model_type"))


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    # ``./dev bench`` leaves its own words on the command line: they name no model.
    names = [one.name for one in specimens()]
    words = [w for w in sys.argv[1:] if any(w in name for name in names)]
    rows: list[dict[str, Any]] = []
    for specimen in specimens():
        if words and not any(word in specimen.name for word in words):
            continue
        for row in rows_of(specimen):
            rows.append(row)
            if row.get("violated"):
                print(row, flush=True)
        print(specimen.name, len(rows), flush=True)
    bound = [r for r in rows if "bound" in r]
    publish(
        "bounds_attack",
        rows,
        models=len({r["model"] for r in rows}),
        bounded=len({r["model"] for r in bound}),
        bounds=len(bound),
        violated=sum(r["violated"] for r in bound),
        tightest=min(r["ratio"] for r in bound),
    )


if __name__ == "__main__":
    main()
