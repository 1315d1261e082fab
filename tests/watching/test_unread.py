"""What cannot be read is listed by name, with the reason."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise.anatomy.discovery import anatomy_of
from equipoise.anatomy.interception import Interceptor
from equipoise.anatomy.sites import Reason
from equipoise.watching.step.coverage import unread
from tests.models import GPT, GPTConfig
from tests.zoo.specimens import SPECIMENS


class Site(nn.Module):
    """Projections under usual names, and attention of some unusual kind."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).unbind(-3)
        out: Tensor = self.proj(self.attend(q, k, v).flatten(-2))
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.exp(torch.einsum("bqhd,bkhd->bhqk", q, k))
        weights = weights / weights.sum(-1, keepdim=True)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def reasons(model: nn.Module, x: Tensor) -> dict[str, Reason]:
    anatomy, captured = anatomy_of(model), set()

    def listen(call: Any) -> None:
        captured.add(anatomy.names[id(call.module)])

    with Interceptor(anatomy, listen) as interceptor:
        model(x)
    return unread(anatomy, captured, interceptor.gaps)


def test_a_softmax_written_out_by_hand() -> None:
    found = reasons(nn.Sequential(Site()), torch.randn(2, 5, 8))
    assert found["0"].code == "unknown_attention"


def test_linear_attention_is_named() -> None:
    model = GPT(GPTConfig(width=16, heads=2, depth=2, attention="linear"))
    found = reasons(model, torch.zeros(1, 6, dtype=torch.long))
    assert set(found) == {"blocks.0.attention", "blocks.1.attention"}
    assert found["blocks.0.attention"].code == "linear_attention"


def test_what_was_read_is_not_listed() -> None:
    model = GPT(GPTConfig(width=16, heads=2, depth=2))
    assert reasons(model, torch.zeros(1, 6, dtype=torch.long)) == {}


def test_a_kernel_from_outside_torch_is_named() -> None:
    library = torch.library.Library("vllm_flash_attn", "DEF")
    library.define("_flash_attn_forward(Tensor q, Tensor k, Tensor v) -> Tensor")
    library.impl("_flash_attn_forward", lambda q, k, v: v, "CompositeExplicitAutograd")

    class Flash(Site):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = torch.ops.vllm_flash_attn._flash_attn_forward(q, k, v)
            return out

    try:
        with torch.no_grad():
            found = reasons(nn.Sequential(Flash()), torch.randn(2, 5, 8))
    finally:
        library._destroy()
    assert "vllm_flash_attn._flash_attn_forward" in found["0"].kernel


def test_a_function_of_flash_attn_or_xformers_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def memory_efficient_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v

    memory_efficient_attention.__module__ = "xformers.ops"
    home = ModuleType("somebodys_model")
    monkeypatch.setitem(sys.modules, home.__name__, home)
    home.__dict__["kernel"] = memory_efficient_attention
    code = "def forward(self, x): return kernel(x, x, self.proj(x))"
    exec(code, home.__dict__)
    kind = type(
        "Kernel", (Site,), {"forward": home.forward, "__module__": home.__name__}
    )
    found = reasons(nn.Sequential(kind()), torch.randn(2, 5, 8))
    assert found["0"] == Reason("foreign_kernel", kernel="xformers.ops.kernel")


def test_hugging_faces_flash_attention_is_named() -> None:
    model = next(s for s in SPECIMENS if s.name == "LlamaForCausalLM").build("sdpa")
    model.config._attn_implementation = "flash_attention_2"  # type: ignore[union-attr]
    found = unread(anatomy_of(model), set())
    why = Reason("implementation", kernel="flash_attention_2")
    assert [*found.values()] == [why, why]
