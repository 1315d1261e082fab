"""Where curvlinops is right it is our witness; where it is wrong, we say where."""

import torch
from curvlinops import GGNLinearOperator, HessianLinearOperator
from torch import nn
from torch.nn import CrossEntropyLoss
from torch.nn.attention import SDPBackend, sdpa_kernel

from equipoise.auditing.curvature import Operator, gauss_newton, hessian
from tests.auditing.curvature import subjects


class Flat(nn.Module):
    """curvlinops wants one row of logits per target."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model(x)
        return out.reshape(-1, out.shape[-1])


def both(
    norm: str, theirs: type, ours: Operator, v_N: torch.Tensor
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model, (x, y) = subjects.gpt(norm=norm).eval(), subjects.pair()
    flat = Flat(model)
    with sdpa_kernel(SDPBackend.MATH):
        operator = theirs(
            flat,
            CrossEntropyLoss(),
            [p for p in flat.parameters() if p.requires_grad],
            [(x, y.flatten())],
            check_deterministic=False,
            **({} if theirs is HessianLinearOperator else {}),
        )
        found = operator @ v_N
    return ours.split(found), ours.split(ours(v_N))


def test_they_agree_with_rms_norms(rng: torch.Generator) -> None:
    ours = hessian(subjects.gpt(norm="rmsnorm"), subjects.pair())
    v_N = torch.randn(ours.width, generator=rng, dtype=torch.float64)
    a, b = both("rmsnorm", HessianLinearOperator, ours, v_N)
    assert all(torch.allclose(a[name], b[name], atol=1e-12) for name in a)


def test_they_agree_on_gauss_newton(rng: torch.Generator) -> None:
    ours = gauss_newton(subjects.gpt(), subjects.pair())
    v_N = torch.randn(ours.width, generator=rng, dtype=torch.float64)
    a, b = both("layernorm", GGNLinearOperator, ours, v_N)
    assert all(torch.allclose(a[name], b[name], atol=1e-12) for name in a)


def test_curvlinops_is_wrong_at_layer_norm_weights(rng: torch.Generator) -> None:
    """jvp of jacrev corrupts (weight, input) of F.layer_norm, and nothing else.

    Ours is checked against differenced gradients in test_operator. When this test
    fails, curvlinops (or torch) has been mended and may be used there too.
    """
    ours = hessian(subjects.gpt(), subjects.pair())
    v_N = torch.randn(ours.width, generator=rng, dtype=torch.float64)
    a, b = both("layernorm", HessianLinearOperator, ours, v_N)
    wrong = {name for name in a if not torch.allclose(a[name], b[name], atol=1e-8)}
    assert wrong == {name for name in a if name.endswith("norm.weight")}
