"""Text and images, in an order that any machine repeats."""

from equipoise.lab.data.batches import Batch, Batches, ImageBatches, Images, Windows
from equipoise.lab.data.corpus import Corpus, embedded, from_bytes, text, token_file
from equipoise.lab.data.order import Order, Share

__all__ = [
    "Batch",
    "Batches",
    "Corpus",
    "ImageBatches",
    "Images",
    "Order",
    "Share",
    "Windows",
    "embedded",
    "from_bytes",
    "text",
    "token_file",
]
