"""Batches of tokens or images: the same on every machine, resumable, split over ranks.

Windows of a corpus, pictures, and Hugging Face datasets streamed and packed.

Axes, in this file:  B batch · T token · I channel · Y X pixels.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from equipoise.errors import InputError
from equipoise_lab.data.corpus import Corpus


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """Which part of the work is this process's."""

    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise InputError(f"rank {self.rank} is not one of {self.world}")


def share() -> RankShare:
    """Return this process's part of the data: all of it, unless a group exists."""
    if not dist.is_initialized():
        return RankShare()
    return RankShare(rank=dist.get_rank(), world=dist.get_world_size())


class Order:
    """Examples 0 … size-1, shuffled anew each epoch by the seed alone.

    Example i of the run belongs to batch i // (batch·world); within it ranks take
    consecutive parts, so no two ranks ever read the same one. ``position`` counts
    batches of all ranks together, and is all that resuming needs.

    >>> order = Order(6, batch=2, seed=0)
    >>> sorted(torch.cat([order.take() for _ in range(3)]).tolist())
    [0, 1, 2, 3, 4, 5]
    """

    def __init__(
        self, size: int, *, batch: int, seed: int = 0, share: RankShare | None = None
    ) -> None:
        self.share = share or RankShare()
        self.size, self.batch, self.seed = size, batch, seed
        self.position = 0
        self._epoch, self._shuffled = -1, torch.empty(0, dtype=torch.long)
        if size < batch * self.share.world:
            raise InputError(
                f"{size} examples are fewer than one batch of {batch} on each of "
                f"{self.share.world} processes; use a smaller batch or more data"
            )

    def take(self) -> Tensor:
        """Return this rank's next indices, and move on."""
        whole = self.batch * self.share.world
        # Batches never straddle epochs: the remainder of an epoch is left out.
        per_epoch = self.size // whole
        epoch, index = divmod(self.position, per_epoch)
        if epoch != self._epoch:
            self._epoch, self._shuffled = epoch, self._shuffle(epoch)
        start = index * whole + self.share.rank * self.batch
        self.position += 1
        return self._shuffled[start : start + self.batch]

    def _shuffle(self, epoch: int) -> Tensor:
        mixed = (self.seed * 1_000_003 + epoch) % 2**63
        return torch.randperm(self.size, generator=torch.Generator().manual_seed(mixed))


Batch = tuple[Tensor, Tensor]


class Batches(Protocol):
    """What the trainer reads: inputs and targets, one batch after the other."""

    def take(self) -> Batch:
        """Return this rank's next (input, target)."""
        ...

    def state(self) -> dict[str, Any]:
        """Return plain values from which ``restore`` continues exactly."""
        ...

    def restore(self, state: dict[str, Any]) -> None: ...


class Windows:
    """Windows of T tokens that do not overlap; the target is one token further."""

    def __init__(
        self,
        corpus: Corpus,
        *,
        context: int,
        batch: int,
        seed: int = 0,
        share: RankShare | None = None,
    ) -> None:
        self.corpus, self.context = corpus, context
        count = (len(corpus.tokens) - 1) // context
        if count == 0:
            raise InputError(
                f"a corpus of {len(corpus.tokens)} tokens holds no window of {context}"
            )
        self.order = Order(count, batch=batch, seed=seed, share=share)

    def take(self) -> Batch:
        starts = self.order.take().numpy() * self.context
        at_BT = starts[:, None] + np.arange(self.context + 1)
        window_BT = torch.from_numpy(self.corpus.tokens[at_BT].astype(np.int64))
        return window_BT[:, :-1].contiguous(), window_BT[:, 1:].contiguous()

    def state(self) -> dict[str, Any]:
        return {"position": self.order.position}

    def restore(self, state: dict[str, Any]) -> None:
        self.order.position = int(state["position"])


@dataclass(frozen=True, kw_only=True, eq=False)
class Images:
    """Images in [-1, 1] and their classes."""

    image_NIYX: Tensor
    label_N: Tensor
    classes: int = 10

    def __post_init__(self) -> None:
        if len(self.image_NIYX) != len(self.label_N) or not len(self.label_N):
            raise InputError(
                f"{len(self.image_NIYX)} images and {len(self.label_N)} labels"
            )


class ImageBatches:
    """Images in the order of the seed."""

    def __init__(
        self,
        images: Images,
        *,
        batch: int,
        seed: int = 0,
        share: RankShare | None = None,
    ) -> None:
        self.images = images
        self.order = Order(len(images.label_N), batch=batch, seed=seed, share=share)

    def take(self) -> Batch:
        chosen_B = self.order.take()
        return self.images.image_NIYX[chosen_B], self.images.label_N[chosen_B]

    def state(self) -> dict[str, Any]:
        return {"position": self.order.position}

    def restore(self, state: dict[str, Any]) -> None:
        self.order.position = int(state["position"])


FINEWEB = "HuggingFaceFW/fineweb"
END = 256  # after each document, where tokens are bytes
Encode = Callable[[str], list[int]]


def byte_tokens(text: str) -> list[int]:
    """Return UTF-8 bytes and the end of the document.

    >>> byte_tokens("ab")
    [97, 98, 256]
    """
    return [*text.encode(), END]


def tokenizer(name: str) -> Encode:
    """Return a Hugging Face tokenizer by name; each document ends in its EOS."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    return lambda text: [*loaded(text)["input_ids"], loaded.eos_token_id]


class Packed:
    """Documents one after the other, cut into windows without padding.

    Document i belongs to rank i mod world. The position is how many documents this
    rank has read and the tokens it has not used yet: resuming is exact.
    """

    def __init__(
        self,
        source: str | Path = FINEWEB,
        *,
        context: int,
        batch: int,
        encode: Encode = byte_tokens,
        column: str = "text",
        share: RankShare | None = None,
    ) -> None:
        self.source, self.column, self.encode = str(source), column, encode
        self.context, self.batch, self.share = context, batch, share or RankShare()
        self._documents, self._rest = 0, [0] * 0
        self._stream: Iterator[dict[str, Any]] | None = None

    def take(self) -> Batch:
        needed = self.batch * self.context + 1
        while len(self._rest) < needed:
            self._rest += self.encode(self._next_document())
        line = torch.tensor(self._rest[:needed])
        # The last target is the next window's first input: no token goes unused.
        self._rest = self._rest[needed - 1 :]
        shape = (self.batch, self.context)
        return line[:-1].view(shape), line[1:].view(shape)

    def _next_document(self) -> str:
        if self._stream is None:
            skipped = self._documents * self.share.world + self.share.rank
            self._stream = iter(opened(self.source).skip(skipped))
        row = next(self._stream, None)
        for _ in range(self.share.world - 1):
            next(self._stream, None)
        if row is None:
            raise InputError(
                f"{self.source} ended after {self._documents} documents of this "
                "process: train fewer steps, or give more data"
            )
        self._documents += 1
        if self.column not in row:
            raise InputError(
                f"{self.source} has no column {self.column!r}; it has {', '.join(row)}"
            )
        return str(row[self.column])

    def state(self) -> dict[str, Any]:
        return {"documents": self._documents, "rest": list(self._rest)}

    def restore(self, state: dict[str, Any]) -> None:
        self._documents, self._rest = int(state["documents"]), list(state["rest"])
        self._stream = None


def opened(source: str) -> Any:
    """Return a streamed dataset: parquet if there is some, or one by name."""
    from datasets import load_dataset

    path = Path(source)
    if path.suffix == ".parquet" or path.is_dir():
        files = [path] if path.is_file() else sorted(path.glob("*.parquet"))
        if not files or not path.exists():
            raise InputError(f"no parquet file at {source}")
        names = [str(file) for file in files]
        return load_dataset("parquet", data_files=names, split="train", streaming=True)
    return load_dataset(source, split="train", streaming=True)
