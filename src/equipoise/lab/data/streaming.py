"""Hugging Face datasets, streamed, tokenised and packed into full windows.

Axes, in this file:  B batch · T token.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from equipoise.errors import InputError
from equipoise.lab.data.batches import Batch, Share

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

    loaded = AutoTokenizer.from_pretrained(name)
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
        share: Share | None = None,
    ) -> None:
        self.source, self.column, self.encode = str(source), column, encode
        self.context, self.batch, self.share = context, batch, share or Share()
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
