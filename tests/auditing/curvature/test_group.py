"""Under DDP and FSDP2 every rank gets the curvature of the whole batch."""

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from tests.auditing.curvature import group, subjects


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(group.rank, args=(port, str(folder)), nprocs=2)  # type: ignore[attr-defined]
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    model, batch = subjects.gpt(), subjects.pair(4)
    return group.curvature(model, batch, group.stepped(model, batch))


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "name", ["hessian", "cut", "gauss-newton", "preconditioned", "top", "ratio"]
)
def test_ranks_see_what_one_process_sees(
    ranks: list[dict[str, Any]], alone: dict[str, Any], wrapper: str, name: str
) -> None:
    first, second = (torch.as_tensor(rank[wrapper][name]) for rank in ranks)
    truth = torch.as_tensor(alone[name])
    assert torch.equal(first, second)
    # Adam's √v amplifies the rounding of a small gradient; products alone do not.
    tolerance = 1e-12 if name in ("hessian", "cut", "gauss-newton") else 1e-8
    assert (first - truth).norm() <= tolerance * truth.norm()
