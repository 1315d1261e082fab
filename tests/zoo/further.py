"""Further inmates: read by what they call; for most of them no table was written."""

from typing import Any

from tests.zoo.specimens import (
    CROSSED,
    D_MODEL,
    EAGER,
    GROUPED,
    GUESSED,
    IMAGE,
    SEEN,
    text,
)
from tests.zoo.wider import COLLECTION, CONVOLVED, HEARD, SHARED, SMALL

SPOKEN: dict[str, Any] = {**HEARD, **CONVOLVED, **GUESSED}
PICTURED: dict[str, Any] = {**SEEN, **IMAGE, **GUESSED}
WRITTEN: dict[str, Any] = {**EAGER, **GUESSED}
XLM = {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "pad_index": 0}

FURTHER = [
    text("HeliumModel", **GROUPED),
    text("Ernie4_5Model", **SHARED),
    text("ApertusModel", **SHARED, **GUESSED),
    text("CamembertModel"),
    text("Data2VecTextModel"),
    text("XLMRobertaXLModel", **GUESSED),
    text("XLMModel", **WRITTEN, **XLM),
    text("FlaubertModel", **WRITTEN, **XLM),
    text("OpenAIGPTModel", **WRITTEN, **SMALL),
    text("MegatronBertModel", **WRITTEN),
    text("TapasModel", **WRITTEN),
    text("VisualBertModel", **WRITTEN),
    text("GPTNeoXJapaneseModel", **WRITTEN),
    text("MvpModel", **WRITTEN, **CROSSED, **D_MODEL),
    text("DINOv3ViTModel", **PICTURED),
    text("IJepaModel", **PICTURED),
    text("ViTMSNModel", **PICTURED),
    text("UniSpeechModel", **SPOKEN),
    text("WavLMModel", **SPOKEN, **EAGER),
]
EVERYTHING = [*COLLECTION, *FURTHER]
