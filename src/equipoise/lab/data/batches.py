"""Batches of tokens or images, deterministic and resumable.

Axes, in this file:  B batch · T token · I channel · Y X pixels.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from equipoise.errors import InputError
from equipoise.lab.data.corpus import Corpus
from equipoise.lab.data.order import Order, Share

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
        share: Share | None = None,
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
        self, images: Images, *, batch: int, seed: int = 0, share: Share | None = None
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
