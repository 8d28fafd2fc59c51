"""Every collective that torch offers, on a stand-in: answered as a real group would, without peers."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.nn.parallel import DistributedDataParallel

from gridagent.train import group as groups
from gridagent.train.group import COLLECTIVES, ForwardingGroup, GroupError, GroupRegistry, check_torch
from gridagent.train.standin import StandInGroup, StandInStore


def test_every_forwarded_collective_has_a_stand_in() -> None:
    missing = [name for name in COLLECTIVES if not callable(getattr(StandInGroup, name, None))]
    assert missing == []
    assert all(name in vars(ForwardingGroup) for name in COLLECTIVES)


def test_this_torch_is_known() -> None:
    check_torch()


def test_an_unknown_collective_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Newer(dist.ProcessGroup):
        def all_reduce_sparse(self) -> None: ...

    monkeypatch.setattr(groups, "ProcessGroup", Newer)
    with pytest.raises(GroupError, match=r"does not forward: all_reduce_sparse\. Use a tested version"):
        check_torch()


def one_rank(name: str, standin: StandInGroup | None) -> ForwardingGroup:
    """A group of one rank over gloo, or over a stand-in: both must answer alike."""
    registry = GroupRegistry()
    registry.standin = (lambda _rank, _size: standin) if standin else None

    class Options:
        global_ranks_in_group = [0]
        group_rank, group_size, group_id = 0, 1, name
        store = HashStore()
        timeout = timedelta(seconds=20)

    return registry.create(Options())


def answers(group: ForwardingGroup) -> list[torch.Tensor]:
    """What every collective leaves behind."""
    own = torch.arange(6, dtype=torch.float32)
    made = {
        name: torch.full((6,), -1.0) for name in ("gather", "single", "scatter", "rs", "rss", "a2a", "base")
    }
    works = [
        group.allreduce([own]),
        group.broadcast([own]),
        group.reduce([own]),
        group.allgather([[made["gather"]]], [own]),
        group._allgather_base(made["single"], own),
        group.scatter([made["scatter"]], [[own]]),
        group.reduce_scatter([made["rs"]], [[own]]),
        group._reduce_scatter_base(made["rss"], own, dist.ReduceScatterOptions()),
        group.alltoall_base(made["a2a"], own, [], []),
        group.gather([[made["base"]]], [own]),
        group.barrier(),
    ]
    for work in works:
        work.wait()
    assert group.in_flight() == 0
    return [own, *made.values()]


def test_a_stand_in_of_one_rank_answers_as_gloo_does() -> None:
    real = one_rank("real", None)
    alike = one_rank("alike", StandInGroup(0, 1))
    for one, other in zip(answers(real), answers(alike), strict=True):
        assert torch.equal(one, other)
    real.shutdown()


def test_shapes_with_more_ranks() -> None:
    standin = StandInGroup(1, 3)
    own = torch.arange(4.0)
    gathered = torch.empty(12)
    standin.all_gather_single(gathered, own).wait()
    assert torch.equal(gathered, own.repeat(3))
    in_place = torch.arange(12.0)
    standin.all_gather_single(in_place, in_place[4:8]).wait()  # as FSDP2 does
    assert torch.equal(in_place, torch.arange(4.0, 8.0).repeat(3))
    part = torch.empty(4)
    standin.reduce_scatter_single(part, torch.arange(12.0)).wait()
    assert torch.equal(part, torch.arange(4.0, 8.0))


def test_ddp_takes_the_replayed_buckets_over() -> None:
    """The layout of a job whose rank 0 saw its gradients in another order."""
    layout = [[0, 1, 5], [4, 3, 2]]
    registry = GroupRegistry()
    registry.standin = lambda rank, size: StandInGroup(rank, size, layout)
    dist.Backend.register_backend("grid-test", registry.create, extended_api=True, devices=["cpu"])
    dist.init_process_group("grid-test", store=StandInStore(3), rank=1, world_size=3)
    try:
        linear = torch.nn.Linear
        model = DistributedDataParallel(torch.nn.Sequential(linear(4, 4), linear(4, 4), linear(4, 4)))
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
        told = model._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]
        assert told.replace(", ", ",") == ",".join(" ".join(map(str, bucket)) for bucket in layout)
    finally:
        del model
        dist.destroy_process_group()
