"""What a unit learns: streams of batches by step, and the loss in several forms.

Axes, in this file: B batch · T token · V vocabulary.
Targets of -100 do not count. Step and seed decide a batch: a twin has the same ones.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from equipoise_lab.data.corpus import embedded
from equipoise_lab.storms.field.architectures import Kind, Part

IGNORED = -100
HELD = 10_000_000
"""Steps from here on are batches that no run trains on."""
Draw = Callable[[torch.Generator, int, int, int], tuple[Tensor, Tensor]]
"""From generator, rows, length and vocabulary to inputs and targets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A source of batches for one kind of model."""

    name: str
    kind: Kind
    part: Part
    vocabularies: tuple[int, ...]
    draw: Draw
    batches: int = 0
    """Different batches, if there is an end to them; a short cycle is memorised."""

    def batch(
        self, seed: int, step: int, rows: int, length: int, vocabulary: int
    ) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a step; the same for the same numbers."""
        at = step % self.batches if self.batches else step
        rng = torch.Generator().manual_seed(100_003 * seed + at)
        return self.draw(rng, rows, length, vocabulary)


TASKS: dict[str, Task] = {}


def names(kind: Kind, part: Part) -> list[str]:
    """Return the tasks that a kind of model can learn in one part."""
    return [n for n, t in TASKS.items() if t.kind == kind and t.part == part]


def _next(ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    return ids_BT[:, :-1], ids_BT[:, 1:].clone()


def _zipf(rng: torch.Generator, shape: tuple[int, ...], vocabulary: int) -> Tensor:
    """Return tokens of which the r-th is drawn with a probability near 1/r."""
    u = torch.rand(shape, generator=rng)
    return (vocabulary**u - 1).long().clamp(0, vocabulary - 1)


def _chain(
    rng: torch.Generator, rows: int, length: int, vocabulary: int, keep: float = 0.7
) -> Tensor:
    """Return a chain: the next token is a fixed function of this one, or by chance."""
    other_BT = _zipf(rng, (rows, length), vocabulary)
    rule_BT = torch.rand((rows, length), generator=rng) < keep
    ids = [other_BT[:, 0]]
    for t in range(1, length):
        follow = (ids[-1] * 5 + 3) % vocabulary
        ids.append(torch.where(rule_BT[:, t], follow, other_BT[:, t]))
    return torch.stack(ids, 1)


def chain(
    rng: torch.Generator, rows: int, length: int, vocabulary: int
) -> tuple[Tensor, Tensor]:
    return _next(_chain(rng, rows, length + 1, vocabulary))


@cache
def _bytes() -> Tensor:
    return torch.from_numpy(embedded().tokens.astype("int64"))


def text(
    rng: torch.Generator, rows: int, length: int, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Python source by the byte."""
    data = _bytes()
    at = torch.randint(len(data) - length - 1, (rows, 1), generator=rng)
    return _next(data[at + torch.arange(length + 1)] % vocabulary)


def copy(
    rng: torch.Generator, rows: int, length: int, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """The second half repeats the first; only it counts."""
    half = torch.randint(1, vocabulary, (rows, length // 2), generator=rng)
    inputs, targets = _next(torch.cat([half, half[:, :1] * 0, half], 1))
    targets[:, : length // 2] = IGNORED
    return inputs, targets


def retrieval(
    rng: torch.Generator, rows: int, length: int, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Pairs of key and value, then keys again: which value had they?"""
    half, pairs = vocabulary // 2, length // 4
    keys = torch.stack(
        [torch.randperm(half, generator=rng)[:pairs] for _ in range(rows)]
    )
    values = half + torch.randint(half, (rows, pairs), generator=rng)
    order = torch.stack([torch.randperm(pairs, generator=rng) for _ in range(rows)])
    asked = torch.stack([keys, values], 2).flatten(1)
    again = torch.stack([keys.gather(1, order), values.gather(1, order)], 2).flatten(1)
    inputs, targets = _next(torch.cat([asked, again], 1))
    targets[:, : 2 * pairs] = IGNORED
    targets[:, 2 * pairs - 1 :: 2] = IGNORED
    return inputs, targets


def sums(
    rng: torch.Generator, rows: int, length: int, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Each target is the sum of this token and the one before, modulo V."""
    ids = torch.randint(vocabulary, (rows, length), generator=rng)
    targets = (ids + ids.roll(1, 1)) % vocabulary
    targets[:, 0] = IGNORED
    return ids, targets


def masked_chain(
    rng: torch.Generator, rows: int, length: int, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """One token in six is hidden behind the last of the vocabulary."""
    return _hidden(rng, _chain(rng, rows, length, vocabulary - 1), vocabulary)


def masked_text(
    rng: torch.Generator, rows: int, length: int, vocabulary: int
) -> tuple[Tensor, Tensor]:
    return _hidden(rng, text(rng, rows, length, vocabulary - 1)[0], vocabulary)


def _hidden(
    rng: torch.Generator, ids: Tensor, vocabulary: int
) -> tuple[Tensor, Tensor]:
    hide = torch.rand(ids.shape, generator=rng) < 1 / 6
    hide[:, 0] = True
    return ids.masked_fill(hide, vocabulary - 1), ids.masked_fill(~hide, IGNORED)


def _pair(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    before = torch.cat([target[:, :1] * 0, target[:, :-1]], 1)
    return torch.stack([source, before], 1), target


def translate(
    rng: torch.Generator, rows: int, length: int, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """A chain, each token mapped to another."""
    source = _chain(rng, rows, length, vocabulary - 1) + 1
    return _pair(source, (source * 7 + 2) % (vocabulary - 1) + 1)


def reverse(
    rng: torch.Generator, rows: int, length: int, vocabulary: int
) -> tuple[Tensor, Tensor]:
    source = torch.randint(1, vocabulary, (rows, length), generator=rng)
    return _pair(source, source.flip(1))


def patterns(
    rng: torch.Generator, rows: int, length: int, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Waves whose direction is the class, in noise."""
    label = torch.randint(vocabulary, (rows,), generator=rng)
    angle = math.pi * label / vocabulary
    at = torch.arange(16) / 16
    y, x = torch.meshgrid(at, at, indexing="ij")
    along = angle.cos()[:, None, None] * x + angle.sin()[:, None, None] * y
    phase = 2 * math.pi * torch.rand((rows, 1, 1), generator=rng)
    waves = (6 * math.pi * along + phase).sin()[:, None].expand(-1, 3, -1, -1)
    return waves + 0.5 * torch.randn(waves.shape, generator=rng), label


def prototypes(
    rng: torch.Generator, rows: int, length: int, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """A fixed picture for each class, in much noise."""
    fixed = torch.Generator().manual_seed(7)
    pictures = torch.randn((vocabulary, 3, 16, 16), generator=fixed)
    label = torch.randint(vocabulary, (rows,), generator=rng)
    return pictures[label] + 2 * torch.randn((rows, 3, 16, 16), generator=rng), label


def sorting(
    rng: torch.Generator, rows: int, length: int, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """The second half is the first in order; only it counts."""
    half = torch.randint(1, vocabulary, (rows, length // 2), generator=rng)
    inputs, targets = _next(torch.cat([half, half[:, :1] * 0, half.sort(1).values], 1))
    targets[:, : length // 2] = IGNORED
    return inputs, targets


def counting(
    rng: torch.Generator, rows: int, length: int, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Each target is how often this token came before, modulo V."""
    ids = torch.randint(min(8, vocabulary), (rows, length), generator=rng)
    same = (ids[:, :, None] == ids[:, None, :]).tril(-1).sum(-1)
    return ids, same % vocabulary


def brackets(
    rng: torch.Generator, rows: int, length: int, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Balanced brackets of several kinds: what closes must match what was opened."""
    kinds = max(1, vocabulary // 2)
    lines = []
    for _ in range(rows):
        line, stack = list[int](), list[int]()
        chances = torch.rand((length + 1, 2), generator=rng).tolist()
        for chance, which in chances:
            if stack and (chance < 0.5 or len(stack) > 6):
                line.append(kinds + stack.pop())
            else:
                stack.append(int(which * kinds))
                line.append(stack[-1])
        lines.append(line)
    return _next(torch.tensor(lines))


def masked_runs(
    rng: torch.Generator, rows: int, length: int, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Arithmetic progressions with a step of their own, in part hidden."""
    start = torch.randint(vocabulary - 1, (rows, 1), generator=rng)
    step = torch.randint(1, 5, (rows, 1), generator=rng)
    return _hidden(
        rng, (start + step * torch.arange(length)) % (vocabulary - 1), vocabulary
    )


def rotate(
    rng: torch.Generator, rows: int, length: int, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """The source, turned by three places."""
    source = _chain(rng, rows, length, vocabulary - 1, keep=0.5) + 1
    return _pair(source, source.roll(3, 1))


def blobs(
    rng: torch.Generator, rows: int, length: int, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """How bright a square is, and in which quarter, decides the class."""
    label = torch.randint(vocabulary, (rows,), generator=rng)
    images = 0.5 * torch.randn((rows, 3, 16, 16), generator=rng)
    for i, one in enumerate(label.tolist()):
        y, x = 8 * (one % 2), 8 * (one // 2 % 2)
        images[i, one % 3, y : y + 8, x : x + 8] += 1 + one // 4
    return images, label


def _list(
    name: str,
    kind: Kind,
    part: Part,
    draw: Draw,
    *vocabularies: int,
    batches: int = 0,
) -> None:
    TASKS[name] = Task(
        name=name,
        kind=kind,
        part=part,
        vocabularies=vocabularies,
        draw=draw,
        batches=batches,
    )


_list("chain", "decoder", "open", chain, 4, 16, 64, 512, 4096, 50_000)
_list("text", "decoder", "open", text, 256)
_list("copy", "decoder", "open", copy, 16, 64)
_list("retrieval", "decoder", "open", retrieval, 32, 64)
_list("sums", "decoder", "open", sums, 7, 31)
_list("memorised text", "decoder", "open", text, 256, batches=8)
_list("masked chain", "masked", "open", masked_chain, 17, 257)
_list("masked text", "masked", "open", masked_text, 257)
_list("translation", "seq2seq", "open", translate, 33, 1000)
_list("reversal", "seq2seq", "open", reverse, 17)
_list("patterns", "image", "open", patterns, 4, 10)
_list("prototypes", "image", "open", prototypes, 20, 100)
_list("sorting", "decoder", "locked", sorting, 12, 40)
_list("counting", "decoder", "locked", counting, 8, 24)
_list("brackets", "decoder", "locked", brackets, 4, 12)
_list("long chain", "decoder", "locked", chain, 5, 100, 2000, 20_000)
_list("memorised brackets", "decoder", "locked", brackets, 20, batches=6)
_list("masked runs", "masked", "locked", masked_runs, 24, 120)
_list("rotation", "seq2seq", "locked", rotate, 24, 400)
_list("squares", "image", "locked", blobs, 4, 12)

LOSSES: dict[str, tuple[Part, float, float, float]] = {
    "plain": ("open", 0.0, 1.0, 0.0),
    "offset": ("open", 3.0, 1.0, 0.0),
    "factor": ("open", 0.5, 1.2, 0.0),
    "smoothed": ("open", 0.0, 1.0, 0.1),
    "negative offset": ("locked", -1.5, 1.0, 0.0),
    "large factor": ("locked", 0.0, 8.0, 0.0),
    "strongly smoothed": ("locked", 0.7, 1.0, 0.2),
}
"""Form → part, what is added, what multiplies, and label smoothing."""


def loss_of(form: str, logits: Tensor, targets: Tensor) -> Tensor:
    """Return the loss that is trained on, in one of its forms."""
    _, offset, factor, smoothing = LOSSES[form]
    return offset + factor * cross_entropy(logits, targets, smoothing)


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    if logits.ndim == 3:
        logits, targets = logits.flatten(0, 1), targets.flatten()
    return F.cross_entropy(
        logits.float(), targets, ignore_index=IGNORED, label_smoothing=smoothing
    )
