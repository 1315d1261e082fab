"""Text and images, in an order that any machine repeats."""

from equipoise_lab.data.batches import (
    Batch,
    Batches,
    ImageBatches,
    Images,
    Order,
    Packed,
    RankShare,
    Windows,
)
from equipoise_lab.data.corpus import Corpus, embedded, from_bytes, text, token_file
from equipoise_lab.data.sources import (
    DataOptions,
    Dataset,
    cifar10,
    digits,
    mnist,
    open_data,
)

__all__ = [
    "Batch",
    "Batches",
    "Corpus",
    "DataOptions",
    "ImageBatches",
    "Images",
    "Dataset",
    "Order",
    "Packed",
    "RankShare",
    "Windows",
    "cifar10",
    "digits",
    "embedded",
    "from_bytes",
    "mnist",
    "open_data",
    "text",
    "token_file",
]
