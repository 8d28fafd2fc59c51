"""torch's watchdog and flight recorder: the rank that is behind, missing or odd."""

import json

import pytest

from gridctl.detect.diagnose.flight_recorder import flight_recorder
from gridctl.detect.diagnose.torch_log import behind_of, missing_of, torch_log
from gridctl.model.diagnosis import Diagnosis, Material

SUSPECT = ("collective_timeout", "isolate_suspect_rank", False)
STACKS = ("collective_timeout", "collect_stacks", False)
MISMATCH = ("collective_mismatch", "fix_app", False)


def materials(*texts: str) -> list[Material]:
    return [Material(f"input{number}", text) for number, text in enumerate(texts)]


def brief(found: list[Diagnosis]) -> list[tuple[str, str, bool]]:
    return [(one.kind, one.action, one.preempt_job) for one in found]


def of_torch(*lines: str) -> list[Diagnosis]:
    return list(torch_log(materials("\n".join(lines))))


def timeout(rank: int, enqueued: int, completed: int = 500, group: str = "0", label: bool = True) -> str:
    return (
        (f"[rank{rank}]:" if label else "")
        + f"[E305 01:02:03.000000001 ProcessGroupNCCL.cpp:2271] [PG ID {group} PG GUID 0(default_pg) "
        f"Rank {rank}]  "
        f"failure detected by watchdog at work sequence id: {completed + 1} PG status: last enqueued "
        f"work: {enqueued}, "
        f"last completed work: {completed}"
    )


def caught(rank: int, op: str, numel: int, seq: int = 501) -> str:
    return (
        f"[rank{rank}]:[E305 01:02:03.000000001 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog "
        f"caught collective "
        f"operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={numel}, NumelOut={numel}, "
        f"Timeout(ms)=600000) ran for 600004 milliseconds before timing out."
    )


def test_the_rank_that_is_behind_is_the_suspect() -> None:
    found = of_torch(*(timeout(rank, 500 if rank == 6 else 512) for rank in range(12)))
    assert brief(found) == [SUSPECT]
    assert found[0].events == [{"rank": 6, "last_enqueued": 500, "last_completed": 500}]
    assert found[0].raw_lines == 12
    two = of_torch(*(timeout(rank, 505 if rank in (1, 2) else 512) for rank in range(12)))
    assert [event["rank"] for event in two[0].events] == [1, 2]


def test_the_older_form_and_a_dump_signal_carry_the_same_counters() -> None:
    older = (
        "[rank{r}]:[E1012 08:00:01.000000000 ProcessGroupNCCL.cpp:1834] [PG 0 (default_pg) Rank {r}] "
        "Exception (either "
        "an error or timeout) detected by watchdog at work: 9, last enqueued NCCL work: {e}, last "
        "completed NCCL work: 8."
    )
    found = of_torch(*(older.format(r=r, e=9 if r == 1 else 20) for r in range(4)))
    assert [event["rank"] for event in found[0].events] == [1]
    dump = (
        "[E ProcessGroupNCCL.cpp:1316] [PG 0 Rank {r}] Received a dump signal due to a collective "
        "timeout from this "
        "local rank and we will try our best to dump the debug info. Last enqueued NCCL work: {e}, "
        "last completed "
        "NCCL work: 8."
    )
    found = of_torch(*(dump.format(r=r, e=9 if r == 2 else 20) for r in range(4)))
    assert [event["rank"] for event in found[0].events] == [2]


def test_without_counters_the_sequence_numbers_tell_who_is_behind() -> None:
    found = of_torch(*(caught(rank, "ALLREDUCE", 64, 700 if rank == 4 else 701) for rank in range(6)))
    assert brief(found) == [SUSPECT]
    assert [event["rank"] for event in found[0].events] == [4]


def test_nobody_behind_or_half_of_all_behind_is_no_suspect() -> None:
    assert brief(of_torch(*(timeout(rank, 512) for rank in range(8)))) == [STACKS]
    assert brief(of_torch(*(timeout(rank, 500 if rank < 5 else 512) for rank in range(8)))) == [STACKS]
    assert brief(of_torch(timeout(3, 512))) == [STACKS]


def test_a_rank_that_said_nothing_is_the_suspect_but_half_a_log_is_no_evidence() -> None:
    found = of_torch(*(timeout(rank, 512) for rank in range(16) if rank != 11))
    assert brief(found) == [SUSPECT]
    assert found[0].events == [{"rank": 11, "said_nothing": True}]
    assert brief(of_torch(*(timeout(rank, 512) for rank in range(8, 16)))) == [STACKS]


def test_other_operations_at_one_number_are_a_fault_of_the_program() -> None:
    lines = [caught(rank, "ALLGATHER" if rank == 3 else "ALLREDUCE", 64) for rank in range(8)]
    assert brief(of_torch(*lines)) == [MISMATCH]
    lines = [caught(rank, "ALLREDUCE", 32 if rank == 5 else 64) for rank in range(8)]
    found = of_torch(*lines)
    assert brief(found) == [MISMATCH]
    assert found[0].events == [{"rank": 5}]
    uneven = [caught(rank, "ALLTOALL", 32 + rank) for rank in range(8)]
    assert brief(of_torch(*uneven)) == [STACKS]
    said = (
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 2 is running collective: "
        "X, but Rank 0"
    )
    assert brief(of_torch(said)) == [MISMATCH]


def test_ras_that_calls_all_well_beside_timeouts_points_at_the_program() -> None:
    table = (
        "NCCL version 2.28.1 compiled with CUDA 13.0\nJob summary\n===========\n  Nodes  Processes   "
        "      GPUs\n"
        "      2          8            1         16       16\nCommunicators... (0.00s)\n=============\n"
        "Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors\n"
        "    0         2         2         8        16        32   RUNNING      {state}\n"
    )
    both = of_torch(table.format(state="OK") + timeout(4, 900))
    assert brief(both) == [STACKS]
    assert both[0].fault == "app"
    assert brief(of_torch(table.format(state="OK"))) == [("none", "none", False)]
    assert brief(of_torch(table.format(state="MISMATCH"))) == [STACKS]
    dead = "    Process 3487984 on node 172.16.64.213 managing GPU 5\n"
    found = of_torch(table.format(state="INCOMPLETE") + dead)
    assert [(one.kind, one.preempt_job) for one in found] == [("peer_unreachable", False)]


def test_a_line_inside_another_line_is_no_line_of_torch() -> None:
    inner = timeout(3, 400)
    assert of_torch(f"loss is {inner}", f"'{inner}'", json.dumps({"prompt": inner})) == []


def test_a_stuck_watchdog_is_secondary_until_proven() -> None:
    stuck = (
        "[rank3]:[F305 01:22:40.003000443 ProcessGroupNCCL.cpp:1557] [PG ID 0 PG GUID 0(default_pg) Rank 3] "
        "ProcessGroupNCCL's watchdog got stuck for 600 seconds without making progress in monitoring."
    )
    assert brief(of_torch(stuck)) == [("watchdog_stuck", "collect_stacks", False)]
    both = of_torch(*(timeout(rank, 512 if rank else 500) for rank in range(8)), stuck)
    assert brief(both) == [SUSPECT, ("watchdog_stuck", "collect_stacks", False)]
    old = (
        "[E ProcessGroupNCCL.cpp:1200] [PG 0 Rank 3] Heartbeat monitor timed out! Process will be terminated"
    )
    assert brief(of_torch(old)) == [("watchdog_stuck", "collect_stacks", False)]


@pytest.mark.parametrize(
    ("text", "expected", "ranks"),
    [
        (
            "Collective id: 9 PG: tp\nExpected ranks: 0-7\nCulprit rank 2; Error type: "
            "COLLECTIVE_TYPE_MISMATCH",
            MISMATCH,
            [2],
        ),
        (
            "Culprit ranks 2, 5; Error type: MatchState.SIZE_OR_SYNTAX_MISMATCH, Expected input sizes",
            MISMATCH,
            [2, 5],
        ),
        ("  Culprit rank 30\n  Error type: COLLECTIVE_DTYPE_MISMATCH", MISMATCH, [30]),
        ("Not all ranks joining collective, sequence number: 7\nmissing ranks: {4, 6}", SUSPECT, [4, 6]),
        ("Culprit rank 3; Error type: COLLECTIVE_STATE_MISMATCH", SUSPECT, [3]),
        ("Culprit rank 3; Error type: UNDECIDED", STACKS, [3]),
    ],
)
def test_what_the_analyser_printed(text: str, expected: tuple[str, str, bool], ranks: list[int]) -> None:
    found = list(flight_recorder(materials(text)))
    assert brief(found) == [expected]
    assert [event["rank"] for event in found[0].events] == ranks


def described(**more: object) -> list[Diagnosis]:
    return list(flight_recorder(materials(json.dumps(more))))


def test_the_rank_without_a_dump_is_the_suspect() -> None:
    names = [f"/tmp/fr/trace_rank_{rank}.pkl" for rank in range(8) if rank != 5]
    found = described(world_size=8, files=names, rank_to_host={"5": "n2", "1": "n1"})
    assert brief(found) == [SUSPECT]
    assert found[0].events == [{"rank": 5, "host": "n2"}]
    by_host = described(
        nranks=4, dumps=["nccl_trace_rank_0", "nccl_trace_rank_1", "nccl_trace_rank_2"], hosts={"n9": "2-3"}
    )
    assert by_host[0].events == [{"rank": 3, "host": "n9"}]
    empty = described(
        world_size=4, dump_dir="x", files={f"rank_{rank}": 900 * (rank != 2) for rank in range(4)}
    )
    assert [event["rank"] for event in empty[0].events] == [2]


def test_all_dumps_or_hardly_any_name_nobody() -> None:
    assert brief(described(world_size=2, files=["nccl_trace_rank_0", "nccl_trace_rank_1"])) == [STACKS]
    assert brief(described(world_size=64, files=["nccl_trace_rank_0", "nccl_trace_rank_1"])) == [STACKS]
    assert described(world_size=64, files=["model_0.pt"], what="else") == []


def test_a_verdict_of_the_analyser_as_json() -> None:
    assert brief(described(culprit_rank=7, error_type="SIZE_OR_SYNTAX_MISMATCH")) == [MISMATCH]
    assert brief(described(missing_ranks=[3, 5], pg="default")) == [SUSPECT]


def test_a_listing_of_dumps_shows_the_hole() -> None:
    listing = "\n".join(f"{4000 * (rank != 9)} nccl_trace_rank_{rank}" for rank in range(12) if rank != 3)
    found = list(flight_recorder(materials(listing)))
    assert [event["rank"] for event in found[0].events] == [3, 9]
    assert list(flight_recorder(materials("100 model_rank_0.pt\n100 model_rank_1.pt"))) == []


def dump(rank: int, sizes: list[list[int]], enqueued: int = 40) -> Material:
    entry = {
        "collective_seq_id": 39,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": sizes,
        "is_p2p": False,
    }
    document = {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}},
        "pg_status": {"0": {"last_enqueued_collective": enqueued, "last_completed_collective": 38}},
        "entries": [{**entry, "pg_name": ["0", "default_pg"]}],
    }
    return Material(f"/x/nccl_trace_rank_{rank}.json", json.dumps(document))


def test_dumps_are_compared_with_each_other() -> None:
    same = [[64, 64]]
    assert brief(list(flight_recorder([dump(rank, same) for rank in range(4)]))) == [STACKS]
    odd = list(flight_recorder([dump(rank, same if rank != 2 else [[64, 32]]) for rank in range(4)]))
    assert brief(odd) == [MISMATCH]
    assert odd[0].events == [{"rank": 2}]
    behind = list(flight_recorder([dump(rank, same, 39 if rank == 1 else 44) for rank in range(4)]))
    assert brief(behind) == [SUSPECT]
    assert behind[0].events == [{"rank": 1}]
    missing = list(flight_recorder([dump(rank, same) for rank in range(3)]))
    assert brief(missing) == [SUSPECT]
    assert missing[0].events == [{"rank": 3, "host": None}]


def test_helpers_know_the_minority() -> None:
    assert behind_of({0: (5,), 1: (5,), 2: (4,)}) == [2]
    assert behind_of({0: (5,), 1: (-1,)}) == []
    assert behind_of({}) == []
    assert missing_of({0, 1, 2, 3, 5}) == [4]
    assert missing_of({0, 9_999_999}) == []
