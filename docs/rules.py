"""The page of every rule: thresholds from the registry, the rest written here."""

from pathlib import Path

from equipoise.judging.remedy_catalogue import CATALOGUE
from equipoise.judging.rules import RULES, Rule

HERE = Path(__file__).parent / "rules"

# Rule: what it means | how it fails. Two sentences each.
TEXTS = """
loss.above_chance | The model is worse than one that guesses. Nothing it has learnt survives. | Where the number of classes is not known, or the loss begins above 1.1 ln V, the first loss is the reference, and the loss must be a fifth above it. Three standard deviations of the mean of 16 losses count as none.
loss.not_falling | Training goes on and the loss is what guessing gives: nothing is learnt. When that is half of the run the verdict is *dead*. | The run's length is Σ rate, so a warm-up is short, and while the rate still rises nothing is said. It needs the number of classes. A plateau below 0.99 ln V is not judged: the best loss of the data is not known, and few classes, half-random data or masked tokens at first have a high one. So a model that learnt only how frequent each class is, is not named by it. A loss that begins above 1.1 ln V has an offset or a factor, and is not judged against ln V.
loss.risen | The loss left its best level by many times its own noise, and stays away. | The noise is at least 1 % of what was learnt so far. New data raise the loss too; it is forgiven as soon as a quarter of the rise has come back. A loss that only stops falling is not risen.
loss.spike_recovered | A batch or a few pushed the loss up, and it returned within 48 steps. It is information and never changes the verdict. | Reported at the first, second, fourth, … spike only. A slow rise is no spike.
attention.saturated | In half of all heads one row in twenty passes no gradient to its queries and keys. Single heads like that are normal in trained models, half of them early in training are not. | A model that starts trained and saturated (first loss far below ln V) is left alone. A few bad heads among many good ones are not named.
attention.logits_large | One logit is so far above the others that softmax is a maximum. In low precision the difference of such logits is rounding. | It waits until one row in twenty of the head is saturated, because a constant on all logits of a row (a key bias) is no trouble. Models with large logits by design (a learnt temperature) need a higher threshold.
attention.logits_growing | Logits multiply within sixteen samples: this is how runs at too high a learning rate begin to die. | Growth below a logit of 20 does not count. Sampling at long intervals sees ordinary growth as fast.
attention.entropy_collapsed | The median head looks at few keys where it looked at many, early in training. | Long training sharpens attention too; the threshold lies far below what that does. A run that starts sharp has little left to lose.
attention.sinks | Most heads spend their mass on the first key. Trained language models do that in many heads, so it is information. | The first key is that of the row's own sequence; in a sliding window later rows do not see it and count with 0.
attention.dead_heads | Even the best row of the head passes nothing back: its queries and keys are frozen as they are. | Heads that copy the previous token perfectly look the same on short inputs.
attention.projections_large | The matrices of queries, keys, values and outputs were drawn too large: logits begin large, and what attention adds drowns the rest. | It judges the first sample of a model whose layers begin alike, so a model that was trained, or whose layers share weights, is not judged.
gradient.vanished | Early layers receive a small part of what late layers receive, and hardly learn. Deep post-LN models do this within tens of steps. | Frozen blocks have no reading and adapters are all alike, so neither is named. Blocks that are not found (an unknown layout) cannot be compared.
gradient.exploding | Early layers receive many times what late layers receive: the backward pass multiplies. | A model whose first block is tiny or special (a stem) can look like it.
gradient.spike | Three steps in a row have several times the usual gradient: bad batches or wrong labels, or the step before a divergence. | One bad batch is not named. Six times the usual scatter of ln norm must be passed as well, so that small batches are not. Where the norm is read at sampled steps only, three samples are needed.
gradient.qk_starved | Of the whole gradient, queries and keys get a twentieth of the share they began with. With θ near zero or tokens alike there is nothing left for them. | It needs sites whose projections were found. Shares are of what was read.
residual.tokens_collapsed | All tokens of a sequence point the same way: attention has nothing to choose from. | A strong common mean raises the cosine without collapse; in a warm-up that is usual, so nothing is said while the rate rises.
residual.growing | The stream is many times what it was at the first sample; norms after it shrink what each branch adds. | Trained models grow single massive tokens over long training; then raise the threshold. The start is the first sample, so a resumed run compares with its resumption.
residual.embedding_large | The stream is so large from the start that what layers add to it hardly counts, and their gradients are divided by its size. | It compares with the norm before the first attention; a model without one reads 1.
residual.outliers | A few channels hold most of the stream's energy; formats with a shared scale lose the rest. | One entry of a small batch can dominate kurtosis, so three samples are asked for.
setting.beyond_peak | The learning rate, the weight decay or ε went far beyond every value it had been at, after it had stood or fallen. | A stage of the training that is meant to run at eight times the rate of the one before is warned, once. A setting that moves from the first steps on is a schedule.
update.too_large | One step moves a large part of the weights. Learning rates at which runs die show here first. | Weights that start at zero (adapters) move by large ratios at first, which three readings in a row leave out. Where an optimiser orthogonalises its steps (Muon, Dion), three tenths of the ratio are judged: such a step is spread over all directions, one along the gradient has few.
update.too_small | The optimiser moves far less than it did at the same learning rate and the same gradient: ε, or a second moment that a spike has filled, holds it. | Judged of optimisers that divide by a second moment (Adam, RMSprop, Adagrad) and of no others. A gradient that shrinks takes the update with it and is not counted. It compares with samples five to twelve.
update.lost | Weights are stored in so few bits that most updates round to nothing. | At a learning rate near zero nothing moves in any format; then the update ratio is below 1e-6 and it is not said. Weights at 256 places of one parameter that the optimiser moves stand for the block.
update.unexplained | The norm of a block's weights grows by more than all its updates together can make it grow: code besides the optimiser writes to the weights. | Only growth is judged: decay, clipping of queries and keys, and weights that are put back on a sphere shrink them. Weights that are swapped for an average or loaded again change once, and of four intervals the one of the largest growth is left out.
norm.gain_high | Some token reaches the norm with so little variance that the norm magnifies every change to it. | Padding tokens count as tokens.
norm.epsilon_rules | For many tokens ε is larger than their variance, so their scale is not normalised. | Read by the preset `deep` only.
curvature.beyond_edge | Along at least one direction a step overshoots further than it came. Healthy runs sit at 1. | Read by the preset `deep` only. Right after the start Adam's preconditioner is not settled, so the first ten samples do not count.
precision.error | Computed in bf16, this head's output would mostly be rounding. | Read by the preset `deep` only. It is a prediction for opened attention; flash kernels err less.
router.collapsed | Most experts get no tokens: the model is smaller than it looks. | An expert counts as starved only if even routing gives so few tokens less than once in a thousand routers, so with few tokens and many experts it says nothing. Training that has just begun may look like it.
router.certain | The router has no doubt left, and so no gradient. | Top-1 routers end there in healthy training; it is information.
mixer.not_written | The gate that writes into a recurrent mixer's state is shut for every token in every head: the layer gives nothing and its β learns nothing. | It reads β of delta rules (Qwen3-Next, Kimi Linear, OLMo hybrid); other mixers have none.
mixer.no_memory | Every head of a recurrent mixer forgets all it held at every token, so the layer mixes nothing. It is information: decay rates are drawn at random, and a layer of few heads may draw only fast ones. | A decay of 2⁻⁸ is nothing in bfloat16; in float32 some of the state before is left.
coverage.stopped | A reading that came regularly has not come for ten of its intervals: from there on the run is not judged by it. | A longer `every` after a resume looks like it for a moment.
ranks.disagree | Replicas of the same weights differ: the ranks train different models. | It needs the reading `ranks.disagreement`, which several ranks give.
"""  # noqa: E501


def texts() -> dict[str, tuple[str, str]]:
    """Return per rule what it means and how it fails."""
    lines = (line.split(" | ") for line in TEXTS.strip().splitlines())
    return {name: (means, fails) for name, means, fails in lines}


def page(rule: Rule) -> str:
    """Return the page of one rule."""
    means, fails = texts()[rule.name]
    sign = "above" if rule.side == "above" else "below"
    severe = f" Beyond {rule.severe:g} it is an error." if rule.severe else ""
    over = f"It is over after {rule.recover} in a row past {rule.release:g}."
    reads = ", ".join(f"`{name}`" for name in rule.reads)
    preset = f" (preset `{rule.preset}`)" if rule.preset else ""
    return "\n".join(
        [
            f"# {rule.name}",
            "",
            f"**What it means.** {means}",
            "",
            f"**What to do.** {_remedies(rule)}",
            "",
            f"**How it fires.** {_measures(rule)}; {sign} {rule.threshold:g} for "
            f"{rule.persist} readings in a row.{severe if rule.lasts else ''} "
            f"{over if rule.lasts else 'It is an event and is reported once.'} "
            "Missing readings change nothing.",
            "",
            f"**Reads.** {reads}{preset}. Scope: {rule.scope}. Severity: "
            f"{rule.severity}.",
            "",
            f"**Threshold from.** {rule.source}.",
            "",
            f"**How it fails.** {fails}",
            "",
            f'Switch it off: `"{rule.name}" = false` under `[rules]` in '
            "`equipoise.toml`; another threshold: a number in place of `false`.",
            "",
        ]
    )


def _measures(rule: Rule) -> str:
    return (rule.measure.__doc__ or "").strip().splitlines()[0].rstrip(".")


def _remedies(rule: Rule) -> str:
    if not rule.remedies:
        return "Read the finding: it names what is not read."
    first, *others = (CATALOGUE[name].does for name in rule.remedies)
    rest = f" If that does not help: {'; '.join(others)}." if others else ""
    return f"First {first}.{rest}"


def index() -> str:
    """Return the list of all rules."""
    rows = [
        f"| [{rule.name}]({_link(rule)}) | {_measures(rule)} | "
        f"{'>' if rule.side == 'above' else '<'} {rule.threshold:g} | {rule.severity} |"
        for rule in RULES.values()
    ]
    return INDEX + "\n".join(rows) + "\n"


def _link(rule: Rule) -> str:
    name = Path(rule.page).name
    return name if rule.of == "run" else f"../{name}"


INDEX = """# Rules

A rule is a named condition over readings of a run, of the weights of a checkpoint (`weights.*`, [audit](../audit.md)) or of the first steps of a run (`start.*`, [pre-flight](../preflight.md)). One engine asks them all, and `[rules]` in `equipoise.toml` changes any of them. Rules over a run are judged while training goes on and again whenever the run file is opened, with the same result. `equipoise rules` lists all with thresholds and sources.

A rule is *pending* while its value is beyond the threshold, *fires* after some readings in a row, and is *over* after some in a row past its release value. A step at which it cannot know changes nothing. What rules find about the model is reported from the tenth sampled step on.

The verdict follows: *dead* if numbers are not finite and no eight finite losses have come since, or if the loss stands above 0.9 ln V, near that of a guess, and made no progress for half of the run; *failing* if a rule about the loss fires; *at risk* if a rule about the model fires; *not judged* if fewer than ten steps were sampled, or if the loss, every gradient, or a type of layer that holds more than 5 % of the parameters was not read; *healthy* otherwise, and what else was not seen is named behind it: "healthy; not seen: the targets (fused loss)". Rules of severity *info* change no verdict.

Your own rule:

```py
from equipoise.judging.rules import rule


@rule(
    "mine.loss",
    reads="loss",
    above=8.0,
    source="our last three runs",
    message="the loss is {value:.3g}, above {threshold:g}",
)
def high_loss(history):
    return history.scalar("loss")
```

A package offers its rules through the entry point `equipoise.rules`. In `equipoise.toml`:

```toml
[rules]
"loss.risen" = false
"attention.saturated" = 0.05
"update.too_large" = {threshold = 0.04, persist = 9}
```

| rule | measures | fires | severity |
|---|---|---|---|
"""  # noqa: E501


def pages() -> dict[str, str]:
    """Return every page by file name."""
    own = (rule for rule in RULES.values() if rule.of == "run")
    found = {Path(rule.page).name: page(rule) for rule in own}
    return {"README.md": index(), **found}


def write(folder: Path, texts: dict[str, str]) -> None:
    """Write pages by their file names."""
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(HERE, pages())
