"""Remedies by name: when each fits, and the three lines that apply it. Torch-free.

The code that changes a model is in ``equipoise.remedies``; advice needs only this.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyEntry:
    """A remedy as advice: what to do, when it fits, how to type it."""

    name: str
    does: str
    """What to do, as an imperative."""
    fits: str
    """The troubles it is meant for."""
    code: str
    """Lines for the user's own training loop."""

    @property
    def page(self) -> str:
        return f"docs/remedies/{self.name.replace('_', '-')}.md"


def _applied(name: str, options: str = "") -> str:
    given = f'"{name}", {options}' if options else f'"{name}"'
    return (
        "from equipoise.remedies.catalogue import remedy\n"
        f"undo = remedy({given}).apply(model, optimizer)\n"
        "# undo() takes it back"
    )


_BACK = (
    "from equipoise.remedies.catalogue import remedy\n"
    'undo = remedy("roll_back", checkpoint="last.pt").apply(model, optimizer)\n'
    "# go on with the next batches: those since the checkpoint are skipped"
)

_ENTRIES = (
    ("learning_rate", "halve the learning rate and warm up again",
     "updates too large, logits growing fast, a loss that rises",
     _applied("learning_rate")),
    ("qk_norm", "normalise queries and keys (QK-norm)",
     "attention logits that grow, attention that saturates", _applied("qk_norm")),
    ("qk_clip", "scale W_Q and W_K down where the largest logit passes a limit",
     "attention logits that grow in few heads", _applied("qk_clip")),
    ("temperature", "raise the attention temperature and cool down slowly",
     "attention that saturates early",
     _applied("temperature", "tau=2.0, steps=100")),
    ("head_temperature", "raise the temperature of single heads",
     "a few heads that saturate",
     _applied("head_temperature", "tau=2.0")),
    ("sigma_reparam", "reparametrise projections by their spectral norm (σReparam)",
     "entropy collapse at a high learning rate", _applied("sigma_reparam")),
    ("soft_cap", "cap attention logits smoothly",
     "attention logits that grow", _applied("soft_cap")),
    ("z_loss", "add a z-loss on the output logits",
     "output logits that drift", _applied("z_loss")),
    ("layer_norm_epsilon", "raise ε of the norms whose inputs have little variance",
     "norm gain out of range, gradients that explode at one norm",
     _applied("layer_norm_epsilon")),
    ("update_clip", "clip the size of Adam's updates",
     "updates too large for their weights", _applied("update_clip")),
    ("gradient_clip", "clip the gradient norm at 1.0",
     "gradient spikes, corrupted batches", _applied("gradient_clip")),
    ("adaptive_clip", "clip each row's gradient by the row's own norm",
     "gradients that are large beside their weights", _applied("adaptive_clip")),
    ("spike_handling", "clip each parameter's gradient by its own past",
     "gradient spikes of few parameters", _applied("spike_handling")),
    ("skip_step", "skip steps whose gradient norm is far above the usual",
     "corrupted batches", _applied("skip_step")),
    ("roll_back", "go back to the last checkpoint before it began, and skip its data",
     "a loss that rose and did not come back", _BACK),
    ("optimizer_reset", "reset the optimiser's moments and warm up again",
     "moments that a spike has spoilt", _applied("optimizer_reset")),
    ("beta2", "set β₂ to 0.95 or higher",
     "updates that jump from step to step", _applied("beta2")),
    ("keep_fp32", "keep the named modules in float32",
     "low-precision error above target", _applied("keep_fp32")),
    ("residual_scale", "scale what the branches add to the residual stream",
     "a residual stream that grows", _applied("residual_scale")),
    ("deepnorm_init", "start again with DeepNorm, or with norms before the sub-layers",
     "gradients that vanish over depth in a post-LN model",
     _applied("deepnorm_init")),
    ("path_init", "start again with Q, K, V and O times N^(-1/4)",
     "a deep model that does not begin to learn", _applied("path_init")),
    ("router_balance", "add a load-balance and router z-loss",
     "a router that sends most tokens to few experts", _applied("router_balance")),
    ("normaliser", "put another normaliser in the place of softmax",
     "heads that saturate or spend their mass on the first token",
     _applied("normaliser", 'to="sink"')),
    ("group_learning_rates", "give each group of parameters its own learning rate",
     "updates too large in some layers only", _applied("group_learning_rates")),
    ("weight_cap", "hold the norm of every matrix at a limit",
     "weights that grow without end, or start far too large",
     _applied("weight_cap", "times=2.0")),
    ("master_weights", "keep an exact copy of the weights for the optimiser to step",
     "updates that are lost in the rounding of stored weights",
     _applied("master_weights")),
)  # fmt: skip

CATALOGUE = {
    name: RemedyEntry(name=name, does=does, fits=fits, code=code)
    for name, does, fits, code in _ENTRIES
}
"""Name → entry, the most general first."""


def advise(names: Iterable[str]) -> str:
    """Return the remedies as one line of advice, the first to try in front.

    >>> advise(["learning_rate", "beta2"])
    'halve the learning rate and warm up again; or set β₂ to 0.95 or higher'
    """
    return "; or ".join(CATALOGUE[name].does for name in names)
