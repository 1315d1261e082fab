"""What a rank holds of a tensor on a mesh, without other ranks: they are pretended."""

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from equipoise.anatomy import sharding
from equipoise.anatomy.sharding import Split
from equipoise.probes.sharding import copy_count, shares

RANK, MESH = 5, (2, 4)  # the second row, its second place


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=RANK, world_size=8, store=FakeStore())
    try:
        yield init_device_mesh("cpu", MESH)
    finally:
        dist.destroy_process_group()


def test_which_part_of_an_axis_is_here(mesh: DeviceMesh) -> None:
    def made(*placements: object) -> Tensor:
        return DTensor.from_local(torch.ones(3, 4), mesh, placements, run_check=False)

    both = made(Shard(0), Shard(0))
    assert sharding.split(both, 0) == sharding.piece(both) == Split(5, 8)
    apart = made(Shard(1), Shard(0))
    assert sharding.split(apart, 0) == Split(1, 4)
    assert sharding.split(apart, 1) == Split(1, 2)
    assert sharding.sharded_axes(apart) == {0, 1}
    assert sharding.last_sharded_axis(apart) == 0
    from_behind = made(Replicate(), Shard(-1))
    assert sharding.sharded_axes(from_behind) == {1}
    assert sharding.last_sharded_axis(from_behind) == 1
    summed = made(Partial(), Shard(0))
    assert sharding.summand(summed) == Split(1, 2)
    assert sharding.piece(summed) == Split(1, 4)
    assert not sharding.is_sharded(made(Partial(), Replicate()))


def test_ranks_that_hold_the_same_part_are_counted(mesh: DeviceMesh) -> None:
    def copies(*placements: object) -> int:
        x = DTensor.from_local(torch.ones(3, 4), mesh, placements, run_check=False)
        return copy_count(x, 8)

    assert copy_count(torch.ones(3), 8) == 8
    assert copies(Replicate(), Replicate()) == 8
    assert copies(Replicate(), Shard(0)) == 2
    assert copies(Shard(0), Shard(1)) == 1
    assert copies(Partial(), Replicate()) == 4  # a summand is no copy


def test_what_fsdp_gathers_does_not_stay_sharded(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.ModuleDict({"gathered": nn.Linear(4, 8), "left": nn.Linear(4, 8)})
    for module, placements in (
        (model["gathered"], (Shard(0), Replicate())),
        (model["left"], (Replicate(), Shard(0))),
    ):
        whole = DTensor.from_local(torch.ones(2, 4), mesh, placements, run_check=False)
        module.weight = nn.Parameter(whole)
    fsdp = {id(model["gathered"])}
    monkeypatch.setattr(sharding, "_gathers", lambda module: id(module) in fsdp)
    (left,) = sharding.stays_sharded(model)
    assert left is model["left"].weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares_of_the_ranks_shares_add_up(dtype: torch.dtype) -> None:
    """float32 takes the one call for all, bfloat16 one call each."""
    tensors = [torch.full((3,), 2.0, dtype=dtype), torch.ones(16, dtype=dtype)]
    found = [float(share) for share in shares(tensors, 9)]
    assert [math.hypot(*[x] * 9) for x in found] == pytest.approx([12**0.5, 4.0])
    assert [float(x) for x in shares(tensors, 1)] == pytest.approx([12**0.5, 4.0])
