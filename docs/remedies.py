"""The page of every remedy: code from the catalogue, the rest written here."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docs.rules import write
from equipoise.judging.remedy_catalogue import CATALOGUE, RemedyEntry

HERE = Path(__file__).parent / "remedies"
HALF = "half the rate at the start"
BACK = "roll_back + "

# Remedy | what it changes | what it costs | when it harms | same function at switch-on.
TEXTS = """
learning_rate | Every step uses the rate that your schedule sets times `scale` (0.5), after a warm-up of `warmup` (20) steps. The schedule itself is not touched. | Nothing per step. Training is slower by the factor. | In a run that is merely slow it makes it slower. It does not repair weights that are already lost: then roll back as well. | yes
qk_norm | Queries and keys of each head are divided by their root mean square and multiplied by gains that are learned. The norm comes in over `steps` (20) steps; gains start at each head's present size. | Two norms per attention; 2·heads·width parameters, which join the optimiser's group with the least weight decay. | Heads that use the size of a query as information lose it. A model that is trained and healthy gains nothing. | yes
qk_clip | After each step, a head whose largest logit of that step passes `limit` (100) has its rows of W_Q and W_K scaled so that it is at the limit. Heads that share keys are not touched by each other. | The scores are computed a second time, in blocks, in every training pass. | With a limit below what heads need it takes back at every step what the step has learned. Adam's moments are not rescaled. | yes
temperature | All attention scores are divided by `tau` (2). With `steps` it falls back to 1 over so many steps. | Nothing. | Attention is softer at once, so the loss jumps in a model that has learned to select. | no
head_temperature | The scores of single heads are divided by their own τ: `tau` is one number for all heads, or attention module → one number per head. | Nothing. | The same, in those heads. | no
sigma_reparam | Each projection W acts as γ·W/σ(W): σ is its spectral norm, γ is learned. Undone after steps, the factor is folded into W. | One power iteration per matrix and training pass; one parameter per matrix. | It slows the growth of all directions, wanted or not. A fused map for queries, keys and values has one σ for all three. | yes
soft_cap | Scores z become cap·tanh(z/cap), `cap` is 30. | Fused attention is written out: its scores are held in memory. | Logits near the cap pass little gradient. With flash attention it is refused. | no
z_loss | The gradient of `weight`·mean(log²Σe^logit) is added at the output logits. The loss that your loop prints stays its own. | One softmax over the vocabulary in each backward pass. | It reads how much each token counts from a cross-entropy's gradient; with another loss the weight is not what it says. | yes
layer_norm_epsilon | ε of all norms, or of those named, is raised to `value` (1e-3); none is lowered. | Nothing. | Where tokens have a variance near ε their scale is no longer normalised. | no
update_clip | After each step the move of every matrix is shortened to `ratio` (0.02) of the matrix's norm. | A copy of all matrices during the step. | A matrix that starts near zero (adapters) is held back. | yes
gradient_clip | The gradient is scaled down to norm `limit` (1.0) before each step. | One norm over all gradients. | With Adam a constant factor changes nothing, so a gradient that is always too large is not helped. | yes
adaptive_clip | Each row of a matrix has its gradient limited to `share` (0.05) of the row's norm. | Two norms per row. | Rows that are small by design (a head that starts at zero) hardly move. | yes
spike_handling | Each parameter's gradient is limited to 1.05 times its own running mean. A gradient that is not finite is left out. The means are in `undo.progress`, so that a checkpoint may carry them. | One norm per parameter. | A gradient that grows for a good reason is followed slowly. | yes
skip_step | A step whose gradient norm is above `times` (4) the median of the last 64 is left out: weights and moments stay, bit for bit. At most `most` (8) in a row. `always=True` leaves out every step until it is undone. | The norm is read at every step, which waits for the device. | After a real change of the data it leaves out steps until the new level counts as usual. | yes
roll_back | Weights, buffers and optimiser state are loaded from a checkpoint. Your loop goes on with the next batches: those in between are skipped. | The steps since the checkpoint. | If the cause is still there the run fails again; combine it with the remedy for the cause. | no
optimizer_reset | The optimiser forgets its moments, and the rate warms up again. | The moments. | Adam's first steps are as large as the rate allows, hence the warm-up. | yes
beta2 | Adam's β₂, and ε if given. The second moment is rescaled so that its corrected value is the same before and after. | Nothing. | A β₂ near 1 follows a change of the gradient's size slowly; one below 0.9 is noisy. | yes
keep_fp32 | The named modules hold their parameters and run their own operations in float32 and leave their output wide. A name means the module's own operations: its children are narrow unless named. With `narrow=torch.bfloat16` all other parameters are cast. | Their matrices run in float32, and what reads a wide output multiplies wide. Every operation of the model passes through Python once more. | Named at random it costs the same and helps little: take the names from `equipoise precision`. | no
residual_scale | What every branch adds to the residual stream is multiplied by `scale` (0.5), which comes in over `steps` (20) steps. | Nothing. | Branches must learn to write twice as much to mean the same. | yes, with steps > 0
deepnorm_init | Before training: W_V, W_O and the feed-forward matrices times (8N)^(-1/4), and in a post-LN model branches times (2N)^(-1/4). | Nothing. | Refused once the optimiser has taken steps. A shallow model starts slower. | no
path_init | Before training: W_Q, W_K, W_V and W_O times N^(-1/4); a map that makes queries and keys is met twice in the path, and scaled once. | Nothing. | Refused once the optimiser has taken steps. A shallow model starts slower. | no
router_balance | The gradients of a load-balance loss (`balance`, 0.01) and a router z-loss (`z`, 1e-3) are added at each router's logits. `guard=True` also removes from the router's gradient what drives its experts apart, however large. | A softmax over the experts in each backward pass. | Too large a weight sends tokens to experts that do not suit them. | yes
normaliser | Another normaliser stands in the place of softmax: see [choosing a normaliser](../choosing-a-normaliser.md). | Fused attention is written out: its scores are held in memory. | A trained model was trained with softmax: expect a jump of the loss. | no
group_learning_rates | Each block moves by its own share of every step: √(median λ/λ) from measured curvature, or, without it, blocks whose Adam update is large beside their weights are brought down to twice the median. | A copy of those blocks' parameters during the step. | Shares are fixed when it is applied; measure again after thousands of steps. | yes
weight_cap | After each step every matrix is scaled down to `times` (1.0) the norm it has now, or, with `gain`, to entries of `gain`/√fan-in, whichever is lower. `lasts=False` scales once, when it is applied. | One norm per matrix and step. | Weights that need to grow are held back: `times=2.0` leaves them room. With `gain` a trained model changes at once. | yes, without gain
master_weights | The optimiser steps an exact copy of the weights, which is put back before each step if the loop has rounded them (moved by less than a tenth of their norm); weights that were replaced are taken as they are. | One copy of all parameters, one comparison per step. | Parameters in bfloat16 or float16 are refused: keep them in float32 and use autocast. | yes
"""  # noqa: E501


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What a remedy did to failing runs of one family."""

    rescued: int
    tried: int
    closed: float
    """Mean share of the gap to the healthy run; below 0 it did harm."""

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the share rescued, by Wilson.

        >>> [round(end, 2) for end in Cell(rescued=5, tried=5, closed=1.0).interval]
        [0.57, 1.0]
        """
        n, share, z = self.tried, self.rescued / self.tried, 1.96
        middle = (share + z * z / (2 * n)) / (1 + z * z / n)
        spread = math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
        wide = z * spread / (1 + z * z / n)
        return max(0.0, middle - wide), min(1.0, middle + wide)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.rescued} of {self.tried} ({100 * low:.0f}–{100 * high:.0f} %)"


def remedy_of(label: str) -> str:
    """Return the remedy of a row of the table.

    >>> remedy_of("roll_back + beta2(beta2=0.95)"), remedy_of(HALF)
    ('beta2', 'learning_rate')
    """
    if label == HALF:
        return "learning_rate"
    return label.removeprefix(BACK).split("(")[0]


def texts() -> dict[str, tuple[str, ...]]:
    """Return per remedy what it changes, costs, harms, and whether it preserves."""
    lines = (line.split(" | ") for line in TEXTS.strip().splitlines())
    return {name: tuple(rest) for name, *rest in lines}


def page(entry: RemedyEntry) -> str:
    """Return the page of one remedy."""
    changes, costs, harms, preserves = texts()[entry.name]
    code = entry.code.replace("\n", "\n\n", 1)  # as the formatter has imports
    parts = [
        f"# {entry.name}",
        f"**What to do.** {entry.does[0].upper()}{entry.does[1:]}:",
        f"```py\n{code}\n```",
        f"**When it fits.** {entry.fits[0].upper()}{entry.fits[1:]}.",
        f"**What it changes.** {changes}",
        f"**What it costs.** {costs}",
        f"**When it harms.** {harms}",
        f"**The same function at switch-on.** {preserves[0].upper()}{preserves[1:]}.",
        f"**Measured.** {measured(entry.name)}",
    ]
    return "\n\n".join(parts) + "\n"


def measured(name: str) -> str:
    """Return what became of storms with this remedy, or that it was not tried."""
    lines = [
        f"{family}{'' if label == name else f', {label}'}: {_shown(cell)}"
        for label, families in results().items()
        if remedy_of(label) == name
        for family, cell in families.items()
    ]
    more = natively() if name == "keep_fp32" else ""
    if not lines:
        none = "Not tried on storms; see [the table](README.md#measured-on-storms)."
        return f"{none}{more}"
    how = "[The table](README.md#measured-on-storms) says how."
    return f"Failing runs rescued, of those tried: {'; '.join(lines)}. {how}{more}"


def natively() -> str:
    """Return the errors that the advice of ``precision`` comes to when applied."""
    rows = json.loads((RESULTS.parent / "fragility_applied.json").read_text())["rows"]
    ratios = [r["applied / promised"] for r in rows]
    wide = [100 * r["fp32 products, ours"] for r in rows]
    text = NATIVELY.format(
        half=_errors(rows),
        low=min(ratios),
        high=max(ratios),
        least=min(wide),
        most=max(wide),
    )
    equal = [{k.removeprefix(EQUAL): v for k, v in r.items()} for r in rows]
    beside = [r["applied"] / r["autocast"] for r in equal]
    if not all(f"{EQUAL}applied" in r for r in rows):
        return text + OPENED
    return text + WITHIN.format(
        equal=_errors(equal), best=min(beside), worst=max(beside)
    )


EQUAL = "equal work: "
ERRORS = ("promised", "applied", "autocast", "random sets")


def _errors(rows: list[dict[str, Any]]) -> str:
    """Return rows of a table: the model, the format, the set, its errors."""
    head = f"| model | format | kept | {' | '.join(ERRORS)} |\n|{'---|' * 7}\n"
    shown = (
        [r["model"], r["format"], r["kept"], *(f"{r[c]:.2g}" for c in ERRORS)]
        for r in rows
    )
    return head + "\n".join(f"| {' | '.join(row)} |" for row in shown)


NATIVELY = """

The set that `equipoise precision` names for half of the error, applied and run natively (`python -m benchmarks.fragility_keep applied`):

{half}

Applied ÷ promised is {low:.2f} to {high:.2f}. Random sets of the same size are the mean of five. It is not free: a narrow matrix that reads a wide output is multiplied in float32, which is {least:.0f} to {most:.0f} % of the products; autocast has none."""  # noqa: E501
OPENED = " These rows took fused attention as opened, scores stored: with the fused kernels' own storage, which `equipoise precision` takes now, the promise is nearer."  # noqa: E501
WITHIN = """

With `narrow_products=True` no product reads a number that the narrow dtype cannot hold, as under autocast, and a kept product leaves its sum wide (a GPU has kernels for that; a CPU multiplies the same numbers in float32). `kept_within` in `equipoise.auditing.precision.study` finds a set that makes no more float32 numbers than autocast does:

{equal}

That is {best:.2f} to {worst:.2f} of autocast's error. A model with its norms after the sums (MiniLM) has nothing to gain there: what autocast keeps wide is what matters, and one draw of the rounding moves either error by some percent."""  # noqa: E501


def index() -> str:
    """Return the list of all remedies, and the table of what was measured."""
    rows = [
        f"| [{name}]({Path(entry.page).name}) | {entry.does} | {entry.fits} | "
        f"{texts()[name][3]} |"
        for name, entry in CATALOGUE.items()
    ]
    return INDEX + "\n".join(rows) + "\n" + MEASURED + table()


RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "remedies.json"


def results() -> dict[str, dict[str, Cell]]:
    """Return remedy → family → what the benchmark measured."""
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    tried: dict[str, dict[str, list[dict[str, float]]]] = {}
    for key, row in found.items():
        family, _, name = key.split(" | ")
        tried.setdefault(name, {}).setdefault(family, []).append(row)
    return {
        name: {family: _cell(rows) for family, rows in sorted(families.items())}
        for name, families in sorted(tried.items())
    }


def _cell(rows: list[dict[str, float]]) -> Cell:
    """Return how many were rescued, and the mean share of the gap that was closed.

    A run that is lost altogether closes nothing, and is not in the mean.
    """
    gaps = [
        (row["untreated"] - row["validation"]) / (row["untreated"] - row["healthy"])
        for row in rows
        if row.get("validation") is not None
    ]
    return Cell(
        rescued=sum(bool(row["rescued"]) for row in rows),
        tried=len(rows),
        closed=round(sum(gaps) / len(gaps), 3) if gaps else 0.0,
    )


def _shown(cell: Cell) -> str:
    return f"{cell}, gap {100 * cell.closed:.0f} %".replace("-0 %", "0 %")


def table() -> str:
    """Return remedy × family as Markdown; a cell that was not run says so."""
    found = results()
    families = sorted({family for rows in found.values() for family in rows})
    if not families:
        return "No cell has been run yet.\n"
    head = f"| remedy | {' | '.join(families)} |\n|---|{'---|' * len(families)}\n"
    return head + "".join(
        f"| {name} | {' | '.join(_of(rows, family) for family in families)} |\n"
        for name, rows in found.items()
    )


def _of(rows: Mapping[str, Cell], family: str) -> str:
    return _shown(rows[family]) if family in rows else "not tried"


INDEX = """# Remedies

A remedy is one change to a model or its optimiser, applied in your own loop in one line and taken back in another:

```python
from equipoise.remedies.catalogue import remedy

undo = remedy("learning_rate", scale=0.5).apply(model, optimizer)
undo()
```

`equipoise remedy RUN` names the one to try first for a run's verdict. `equipoise remedies` lists them all.

**Undoing.** Straight after it was applied, `undo()` restores weights, buffers, optimiser state and hooks bit for bit; no random number is drawn. After further steps it restores structure, hooks and options and keeps what was learned. Several remedies are undone in reverse order; in another order the result is the same, or it is refused in one line where a later one changed the same weights or options. `undo.progress` is what a remedy counts while it is active.

**Which models.** `nn.MultiheadAttention`, GPT-2, Llama with grouped queries and the lab's GPT are tested with every remedy; other [families](../families.md) whose projections are known work alike, the rest is refused in one line. Apply remedies before `torch.compile`. Parameters that a remedy adds after DDP or FSDP2 have their gradients averaged over the ranks by the remedy itself; tensor parallelism was not tested.

| remedy | does | fits | same function at switch-on |
|---|---|---|---|
"""  # noqa: E501

MEASURED = """
## Measured on storms

`python -m lab.benchmarks.remedies STORMS` makes a failing run of the storms benchmark again with one remedy, applied when the verdict first leaves *healthy* (initial scales: at the start), at its defaults unless the row names options. `roll_back + X` first loads the latest weights from 20 steps before the trouble began, as you do with a checkpoint, and then applies X; `skip_step(always=True)` is taken back once four losses in a row are up to 1.15 times the usual one. Rescued: the final validation loss is within 5 % of the matched healthy run's and at least half of the gap is closed, at equal optimiser steps; rolled-back steps count. Every storm clips its gradient at 1.0 already, so "clip at 1.0" is the untreated run. Cells: runs rescued of those tried with the 95 % interval (Wilson), and how much of the gap to the healthy run was closed on average; below 0 the remedy did harm. A cell that says *not tried* was not run. No advice is ordered by this table: its runs are all of one small model, and a remedy that is best there need not be best elsewhere. `equipoise remedy RUN` gives a rule's remedies in the order of the rule.

Of every family at most four remedies that fit its cause were tried on five failing runs (`CANDIDATES` in the benchmark); rows with fewer runs were tried earlier and are kept. Options were chosen on seeds 1 to 3, so those runs flatter the rows that name options.

"""  # noqa: E501


def pages() -> dict[str, str]:
    """Return every page by its file name."""
    made = {Path(entry.page).name: page(entry) for entry in CATALOGUE.values()}
    return {"README.md": index(), **made}


if __name__ == "__main__":
    write(HERE, pages())
