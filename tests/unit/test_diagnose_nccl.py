"""NCCL's lines and completions in error: who is the suspect, and who only shouts."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridctl.detect.diagnose.flight_recorder import flight_recorder
from gridctl.detect.diagnose.nccl import nccl
from gridctl.detect.diagnose.rdma import rdma, slurmstepd
from gridctl.detect.diagnose.torch_log import torch_log
from gridctl.model.diagnosis import Diagnosis, Material

SILENT = ("peer_unreachable", "isolate_suspect_peer", True)
FLAP = ("link_flap", "drain_and_check_cable", False)


def materials(*texts: str) -> list[Material]:
    return [Material(f"input{number}", text) for number, text in enumerate(texts)]


def brief(found: list[Diagnosis]) -> list[tuple[str, str, bool]]:
    return [(one.kind, one.action, one.preempt_job) for one in found]


def of_nccl(*lines: str) -> list[Diagnosis]:
    return list(nccl(materials("\n".join(lines))))


def completion(host: str, peer: str, status: int = 12, own: str = "", vendor: int = 129) -> str:
    gid = f" localGid ::ffff:{own} remoteGids ::ffff:{peer}" if own else ""
    return (
        f"{host}:310:402 [2] transport/net_ib.cc:1401 NCCL WARN NET/IB: Got completion from peer "
        f"{peer}<45112> "
        f"with status={status} opcode=0 len=0 vendor err {vendor} (Send){gid} hca mlx5_2"
    )


def port(host: str, event: str, hca: str = "mlx5_7:1") -> str:
    return f"{host}:77:99 [1] transport/net_ib.cc:120 NCCL WARN NET/IB : {hca} Got async event : {event}"


def test_a_port_error_explains_the_retries_of_its_host() -> None:
    found = of_nccl(port("h1", "port error"), port("h1", "port active"), completion("h1", "10.7.0.5"))
    assert brief(found) == [FLAP]
    assert found[0].events[0]["hca"] == "mlx5_7"
    assert found[0].events[0]["peers_not_answering"] == ["10.7.0.5"]
    assert brief(of_nccl(completion("h1", "10.7.0.5"), port("h1", "port error"))) == [FLAP]


@pytest.mark.parametrize(
    "line",
    [
        "h1:77:99 [1] transport/net_ib.cc:93 NCCL WARN NET/IB: mlx5_7:1 Got async event: port error",
        "h1:77:99 [1] NCCL WARN NET/IB : mlx5_7:1 Got non-fatal async event: port error(10)",
        "h1:77:99 [1][3] t.cc:93 NCCL WARN NET/IB : mlx5_7:1 Got async event : port error",
        "h1:77:99 [1] [0] t.cc:93 NCCL WARN NET/IB : mlx5_7:1 Got async event : port error",
        "[2026-02-03 04:05:06] " + port("h1", "port error"),
        "17: " + port("h1", "port error"),
        "[rank9]: " + port("h1", "port error"),
        "2026-02-03T04:05:06.123456789Z stderr F " + port("h1", "port error"),
        "Feb  3 04:05:06 h1 train[77]: " + port("h1", "port error"),
        json.dumps({"t": 1, "line": port("h1", "port error")}),
    ],
)
def test_every_wrapper_and_spelling_of_a_port_error(line: str) -> None:
    assert brief(of_nccl(line)) == [FLAP]


def test_a_port_that_is_active_again_or_an_event_without_weight_is_nothing() -> None:
    assert (
        of_nccl(port("h1", "port active"), port("h1", "client reregistration"), port("h1", "GID change"))
        == []
    )


def test_a_fatal_event_of_the_adapter() -> None:
    assert brief(of_nccl(port("h1", "local catastrophic error"))) == [
        ("nic_firmware_dead", "evacuate_and_reboot", True)
    ]


def test_the_peer_that_several_name_is_the_suspect_and_flushed_reports_count_for_nothing() -> None:
    lines = [completion(f"h{n}", "10.7.0.40", own=f"10.7.0.{n}") for n in range(1, 5)]
    lines += [
        completion(f"h{n}", f"10.7.0.{20 + n}", status=5, vendor=249) for n in range(1, 5) for _ in range(9)
    ]
    found = of_nccl(*lines)
    assert brief(found) == [SILENT]
    assert found[0].events == [{"suspect": "10.7.0.40", "victims": ["h1", "h2", "h3", "h4"]}]


@pytest.mark.parametrize(
    "form",
    [
        "from peer 10.7.0.40<39> with error 12, opcode 1, len 32, vendor err 129",
        "from peer 10.7.0.40<39> with status=12 opcode=0 len=0 vendor err 129 (Recv)",
        "from peer 10.7.0.40<39> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0) reqSize=0 "
        "vendor_err=129 req_type=Send localGid fe80::1 remoteGidsfe80::2 hca mlx5_0",
    ],
)
def test_spellings_of_a_completion(form: str) -> None:
    begins = ("transport/net_ib.cc:829 NCCL WARN NET/IB : ", "NCCL WARN NET/IB: mlx5_0:1 ")
    found = of_nccl(*(f"h{n}:1:2 [0] {begin}Got completion {form}" for n, begin in enumerate(begins)))
    assert brief(found) == [SILENT]
    assert found[0].events[0]["suspect"] == "10.7.0.40"


def test_ranks_of_one_host_are_one_reporter() -> None:
    found = of_nccl(*(completion("h1", "10.7.0.40") for _ in range(8)))
    assert brief(found) == [("peer_unreachable", "manual_review", False)]


def test_one_who_reaches_nobody_is_not_evicted_on_its_own_word() -> None:
    found = of_nccl(*(completion("h1", f"10.7.0.{n}", own="10.7.0.1") for n in range(40, 44)))
    assert brief(found) == [("peer_unreachable", "manual_review", False)]
    assert found[0].why.rule == "nccl.reporter-alone"
    # its peers do not reach it either: now others say so, too
    more = [completion(f"h{n}", "10.7.0.1", own=f"10.7.0.{n}") for n in range(40, 44)]
    both = of_nccl(*(completion("h1", f"10.7.0.{n}", own="10.7.0.1") for n in range(40, 44)), *more)
    assert brief(both) == [SILENT]
    assert both[0].events[0]["suspect"] == "10.7.0.1"


def test_two_that_name_each_other_are_ambiguous_and_many_suspects_are_the_fabric() -> None:
    each = of_nccl(completion("h1", "10.7.0.2", own="10.7.0.1"), completion("h2", "10.7.0.1", own="10.7.0.2"))
    assert brief(each) == [("peer_unreachable", "manual_review", False)]
    many = of_nccl(*(completion(f"h{n}", f"10.7.1.{peer}") for peer in range(9) for n in (1, 2, 3)))
    assert brief(many) == [("peer_unreachable", "manual_review", False)]
    assert many[0].fault == "fabric"


def test_two_dead_peers_are_two_suspects() -> None:
    found = of_nccl(*(completion(f"h{n}", f"10.7.0.{40 + n // 2}") for n in range(4)))
    assert brief(found) == [SILENT, SILENT]


def test_a_port_error_elsewhere_explains_nothing() -> None:
    found = of_nccl(port("h9", "port error"), *(completion(f"h{n}", "10.7.0.40") for n in (1, 2)))
    assert brief(found) == [FLAP, SILENT]


def test_a_closed_connection_names_no_node() -> None:
    lines = [
        f"h{n}:5:6 [0] misc/socket.cc:484 NCCL WARN socketProgress: Connection closed by remote peer "
        f"h7.ib<4321>"
        for n in range(3)
    ]
    assert brief(of_nccl(*lines)) == [("peer_unreachable", "collect_stacks", False)]
    assert brief(of_nccl(completion("h1", "10.7.0.4", status=10))) == [
        ("rdma_cqe_errors", "manual_review", False)
    ]


def test_a_line_inside_another_line_is_no_line_of_nccl() -> None:
    for inner in (completion("h1", "10.7.0.40"), port("h1", "port error")):
        assert of_nccl(f"user says: {inner}", f"print({inner!r})", json.dumps({"prompt": inner})) == []


def test_a_storm_of_completions_keeps_little_and_is_one_event() -> None:
    lines = [completion(f"h{n % 3}", "10.7.0.40") for n in range(20_000)]
    found = of_nccl(*lines)
    assert brief(found) == [SILENT]
    assert (found[0].raw_lines, found[0].event_count, len(found[0].why.evidence)) == (20_000, 1, 5)


def test_completions_that_the_kernel_prints() -> None:
    line = "[ 812.5] infiniband mlx5_4: dump_cqe:272:(pid 88): WC error: {s}, Message: {m}"
    error = list(rdma(materials(line.format(s=12, m="transport retry counter exceeded"))))
    assert [one.kind for one in error] == ["rdma_cqe_errors"]
    flushed = list(rdma(materials(line.format(s=5, m="Work Request Flushed Error"))))
    assert [(one.kind, one.fault) for one in flushed] == [("rdma_cqe_errors", "app")]
    fake = "Feb  3 04:05:06 h1 python[1]: mlx5_4: dump_cqe:272:(pid 88): dump error cqe"
    assert list(rdma(materials(fake))) == []


def test_tasks_that_could_not_be_killed() -> None:
    line = (
        "slurmstepd: error: *** STEP 77.0 STEPD TERMINATED ON n4 AT 2026-02-03T04:05:06 DUE TO JOB "
        "NOT ENDING WITH "
        "SIGNALS ***"
    )
    assert [one.kind for one in slurmstepd(materials(line))] == ["kill_task_failed"]
    line = (
        "slurmstepd: error: Detected 2 oom_kill events in StepId=77.0. Some of the step tasks have "
        "been OOM Killed."
    )
    assert [one.kind for one in slurmstepd(materials(line))] == ["host_oom"]


VICTIMS = [completion(f"h{n}", "10.7.0.40", own=f"10.7.0.{n}") for n in range(1, 5)]
VICTIMS += [completion("h1", "10.7.0.9"), completion("h2", "10.7.0.3", status=5), port("h8", "port active")]


@given(st.permutations(VICTIMS))
def test_the_order_of_lines_changes_no_verdict(lines: list[str]) -> None:
    found = of_nccl(*lines)
    assert brief(found) == [SILENT]
    assert found[0].events == [{"suspect": "10.7.0.40", "victims": ["h1", "h2", "h3", "h4"]}]


PIECES = st.sampled_from(
    [
        "NCCL WARN NET/IB : ",
        "Got completion from peer ",
        "10.0.0.1<9>",
        " with status=12",
        "Got async event : port error",
        "[rank3]:[E1 ProcessGroupNCCL.cpp:1] [PG 0 Rank 3] ",
        "failure detected by watchdog",
        "last enqueued work: ",
        "Culprit rank ",
        "Error type: ",
        "h:1:2 [0] ",
        "\n",
        '{"entries": [], "pg_config": {}}',
        '{"world_size": 3, "files": ["nccl_rank_1"]}',
        "Job summary Communicators...",
        "dump_cqe:1:(pid 1): ",
    ]
)


@given(st.lists(st.one_of(PIECES, st.text(max_size=20)), max_size=30).map("".join))
def test_no_text_makes_these_layers_raise(text: str) -> None:
    for layer in (nccl, rdma, slurmstepd, torch_log, flight_recorder):
        for one in layer(materials(text, text)):
            assert one.why.evidence
            assert not any(ord(letter) < 32 for line in one.why.evidence for letter in line)
