"""The remedies of initial scale make what the laboratory builds by itself."""

import torch
from torch import nn

from equipoise.remedies.catalogue import remedy
from equipoise_lab.models import GPT, GPTConfig
from tests.remedies.families import VOCABULARY, an_optimizer, logits


def test_initial_scales_are_those_that_are_built_in() -> None:
    for name, gains, residual in (
        ("deepnorm_init", "deepnorm", "deepnorm"),
        ("path_init", "path", "pre"),
    ):
        plain = "post" if residual == "deepnorm" else residual
        model = _lab_gpt(residual=plain)
        wanted = _lab_gpt(residual=residual, gains=gains)
        remedy(name).apply(model, an_optimizer(model))
        torch.testing.assert_close(logits(model), logits(wanted), rtol=1e-4, atol=1e-5)
        for key, p in model.named_parameters():
            torch.testing.assert_close(p, wanted.get_parameter(key))


def _lab_gpt(**options: object) -> nn.Module:
    torch.manual_seed(3)
    sizes = {"width": 16, "depth": 3, "heads": 2, "vocabulary": VOCABULARY}
    return GPT(GPTConfig(**{**sizes, **options}))
