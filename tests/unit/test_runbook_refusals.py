"""Everything that a swap is refused for, with the words that a person reads."""

import re
from typing import Any

import msgspec
import pytest
from runbook_world import NOW, fleet, launch, plan_for, rank, report, spare

from gridagent.wire import Blocker, LaunchSpec, SessionReport
from gridctl.errors import Refused
from gridctl.model.fleet import Node, spares
from gridctl.model.plans import Gate, Plan, Request
from gridctl.model.policy import Policy
from gridctl.model.refusals import MEANINGS
from gridctl.model.runs import Run
from gridctl.runbook import gates
from gridctl.runbook.hot_swap import build
from gridctl.runbook.selection import select
from gridctl.runbook.spares import Claims

GPU2: dict[str, Any] = {"ranks": [rank(1, gpus=[0]), rank(2, session="s2", gpus=[1])]}


def refused(nodes: dict[str, Node], policy: Policy | None = None, **request: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        plan_for(nodes, policy, **request)
    assert caught.value.code in MEANINGS
    return caught.value


def blind(nodes: dict[str, Node], name: str) -> dict[str, Node]:
    return {**nodes, name: msgspec.structs.replace(nodes[name], reachable=False, error="timed out")}


def skewed(nodes: dict[str, Node], name: str, skew_s: float) -> dict[str, Node]:
    return {**nodes, name: msgspec.structs.replace(nodes[name], skew_s=skew_s)}


@pytest.mark.parametrize(
    ("nodes", "policy", "code", "words"),
    [
        (fleet(n4={"spares": []}), {}, "no-spare", "no spare is parked in the fleet: run `gridagent park`"),
        (fleet(n4={"spares": [spare(state="warm")]}), {}, "no-spare", "no spare is parked"),
        (fleet(n4={"quarantined": True}), {}, "spare-quarantined", "n4 is quarantined"),
        (fleet(n4={"cordoned": True, "cordon_owner": "slurm"}), {}, "spare-quarantined", "cordoned by slurm"),
        (fleet(n4={"spares": [spare(gpus=[0])]}), {}, "spare-size", "has 1 GPUs, the rank uses 0"),
        (fleet(n4={"gpu_model": "H200"}), {}, "spare-size", "n4 has GPUs of model H200, n2 of unknown"),
        (fleet(n4={"driver": "560"}), {}, "spare-driver", "n4 runs driver 560, n2 555"),
        (
            fleet(n4={"rack": "r9"}),
            {"require_same_rack": True},
            "spare-rack",
            "n4 stands in rack r9, n2 in r1",
        ),
        (
            fleet(n2={"rack": ""}, n4={"rack": ""}),
            {"require_same_rack": True},
            "spare-rack",
            "n4 stands in rack unknown, n2 in unknown",
        ),
        (fleet(n4={"serial": "SN2"}), {}, "same-host", "both say chassis serial SN2"),
        (fleet(n4={"frozen": ["fleet"]}), {}, "frozen", "the fleet is frozen on n4"),
        (
            fleet(n1={"frozen": ["lm"], "frozen_by": {"lm": "bob (smoke)"}}),
            {},
            "frozen",
            "job lm is frozen on n1 by bob (smoke): `gridctl thaw`",
        ),
        (fleet(n4={"wire": 99}), {}, "version-skew", "speaks version 99 of the messages, this controller 1"),
        (fleet(), {"require_attestation": True}, "not-attested", "n2 is not_attested"),
        (blind(fleet(), "n2"), {}, "node-unreachable", "unknown, which is not the same as failed"),
        (blind(fleet(), "n1"), {}, "node-unreachable", "rank 0 of lm is on n1, which does not answer"),
        (
            skewed(fleet(), "n3", -61.0),
            {},
            "clock-skew",
            "the clock of n3 is -61.0 s off, the policy allows 5 s",
        ),
        (fleet(n3={"ranks": []}), {}, "node-unreachable", "nobody reports rank 2 of lm"),
        (fleet(n3={"ranks": [rank(2, connected=False)]}), {}, "rank-silent", "rank 2 of lm on n3 is lost"),
        (fleet(n2={"ranks": []}), {}, "nothing-to-move", "no live rank runs on n2"),
        (fleet(n2={"ranks": [rank(1, state="finished")]}), {}, "nothing-to-move", "no live rank runs on n2"),
    ],
)
def test_a_plan_is_refused(nodes: dict[str, Node], policy: dict[str, Any], code: str, words: str) -> None:
    found = refused(nodes, Policy(**policy))
    assert (found.code, words in found.text) == (code, True), found.text
    assert not found.blockers or any(b.fatal for b in found.blockers)


def test_a_blind_spare_is_not_called_missing() -> None:
    found = refused(blind(fleet(), "n4"))
    assert found.code == "no-spare"
    assert "n4 could not be asked" in found.text


@pytest.mark.parametrize(
    ("changes", "state", "why"),
    [
        ({}, "parked", ""),
        (
            {"cordoned": True, "cordon_owner": "gridctl", "cordon_reason": "r-1"},
            "cordoned",
            "by gridctl: r-1",
        ),
        ({"cordoned": True, "quarantined": True}, "quarantined", "by somebody: no reason given"),
        ({"cordoned": True, "spares": [spare(state="warm")]}, "warm", ""),
        ({"cordoned": True, "spares": [spare(connected=False)]}, "lost", ""),
    ],
)
def test_a_spare_that_takes_no_rank_is_not_shown_as_parked(
    changes: dict[str, Any], state: str, why: str
) -> None:
    (found,) = spares(fleet(n4=changes).values())
    assert (found.state, found.why) == (state, why)
    (silent,) = spares(blind(fleet(n4=changes), "n4").values())
    assert (silent.state, silent.why) == ("unknown", "n4 does not answer")


def test_all_ranks_on_the_node_leave_no_survivor() -> None:
    ranks = [rank(0), rank(1), rank(2)]
    found = refused(fleet(n1={"ranks": []}, n2={"ranks": ranks}, n3={"ranks": []}))
    assert found.code == "no-survivor"
    assert "at least one must stay to arbitrate" in found.text


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    assert "it has n1, n2, n3, n4" in refused(fleet(), node="n9").text
    assert refused(fleet(), to="n9").code == "unknown-node"
    assert refused(fleet(), job="x").code == "unknown-job"
    both = fleet(n2={"ranks": [rank(1), rank(0, job="other", world_size=1, session="o")]})
    assert "--job lm or other" in refused(both).text


def test_a_spare_that_was_asked_for_by_name_is_not_replaced_by_another_one() -> None:
    nodes = fleet(n4={"spares": [spare()]}, n3={"ranks": [rank(2)], "spares": []})
    assert refused(nodes, to="n3").code == "no-spare"


def test_two_ranks_need_two_spares() -> None:
    nodes = fleet(n2={"ranks": [rank(1), rank(2)]}, n3={"ranks": []})
    assert "2 ranks would move, but only 1 usable" in refused(nodes).text
    nodes = fleet(n2={"ranks": [rank(1), rank(2)]}, n3={"ranks": []}, n4={"spares": [spare("a"), spare("b")]})
    plan = plan_for(nodes)
    assert [(m.rank, m.target.session) for m in plan.moves] == [(1, "a"), (2, "b")]


def two_jobs(*parked: str) -> dict[str, Node]:
    """Two jobs of two ranks, which want to leave n2 and n3, and spares."""
    other: dict[str, Any] = {"job": "vit", "world_size": 2}
    return fleet(
        n1={"ranks": [rank(0, world_size=2), rank(0, session="t0", **other)]},
        n2={"ranks": [rank(1, world_size=2)]},
        n3={"ranks": [rank(1, session="t1", **other)]},
        n4={"spares": [spare(name) for name in parked]},
    )


def test_a_spare_that_another_jobs_plan_has_chosen_is_left_to_it_while_there_are_others() -> None:
    first = plan_for(two_jobs("a", "b"))
    mine, theirs = Claims(plans=[first]), Request(node="n3")
    assert first.moves[0].target.session == "a"
    second = select(theirs, two_jobs("a", "b"), Policy(), mine)
    assert ([spare.session for spare in second.spares], second.notes) == (["b"], [])
    again = select(Request(node="n2"), two_jobs("a", "b"), Policy(), mine)  # takes the place of its own plan
    assert ([spare.session for spare in again.spares], again.notes) == (["a"], [])
    last = select(theirs, two_jobs("a"), Policy(), mine)
    assert [spare.session for spare in last.spares] == ["a"]
    assert last.notes == [
        "no other spare is left than the spare on n4, and plan p1 (lm leaves n2) has chosen it too: whichever"
        " is applied first has it"
    ]


def test_a_spare_that_a_run_has_chosen_is_not_chosen_again() -> None:
    first = plan_for(two_jobs("a", "b"))
    running = Claims(runs={"r1": first})
    second = select(Request(node="n3"), two_jobs("a", "b"), Policy(), running)
    assert [spare.session for spare in second.spares] == ["b"]
    assert "run r1 (lm leaves n2) moves a rank to that node: wait for its end" in second.notes[0]
    with pytest.raises(Refused, match=r"taken by run r1 \(lm leaves n2\)") as caught:
        select(Request(node="n3"), two_jobs("a"), Policy(), running)
    assert caught.value.code == "no-spare"


def test_nothing_is_applied_that_would_take_the_spare_of_a_run_or_its_node() -> None:
    first = plan_for(two_jobs("a", "b"))
    gates.check_nodes(first, Claims(plans=[first]))
    with pytest.raises(Refused, match=r"run r1 \(lm leaves n2\) has the spare on n4") as caught:
        gates.check_nodes(first, Claims(runs={"r1": first}))
    assert caught.value.code == "busy"
    beside = plan_for(two_jobs("b"))
    with pytest.raises(Refused, match="has n1, n2, n4, and a node serves one run at a time"):
        gates.check_nodes(beside, Claims(runs={"r1": first}))
    shares = msgspec.structs.replace(beside, node="n8", members=first.members[:1], moves=[])
    with pytest.raises(Refused, match="has n1, and a node serves one run at a time"):
        gates.check_nodes(shares, Claims(runs={"r1": first}))
    elsewhere = [msgspec.structs.replace(member, node="n9") for member in first.members]
    gates.check_nodes(msgspec.structs.replace(shares, members=elsewhere), Claims(runs={"r1": first}))


def test_a_device_moves_alone_and_its_node_is_not_cordoned() -> None:
    nodes = fleet(n2=GPU2, n3={"ranks": []}, n4={"spares": [spare(gpus=[4])]})
    plan = plan_for(nodes, devices=["gpu:1"])
    assert [(m.rank, m.gpus) for m in plan.moves] == [(2, [1])]
    assert "cordon" not in [step.name for step in plan.steps]
    assert plan.chair.node == "n1"
    assert refused(nodes, devices=["gpu:7"]).code == "nothing-to-move"


def test_what_makes_it_impossible_or_not_bit_identical_is_said_with_all_of_it() -> None:
    unregistered = Blocker(code="unregistered-tensor", text="ema is not registered", fatal=True)
    with pytest.raises(Refused) as caught:
        built(report(1, blockers=[unregistered]))
    assert (caught.value.code, caught.value.text) == ("unregistered-tensor", "ema is not registered")
    facts = {"threads": "4", "cpu": "avx512", "torch": "2.13.0"}
    nodes = fleet(n4={"spares": [spare(facts=facts)], "driver": "560"})
    plan = built(report(1), nodes, Policy(require_same_driver=False))
    assert not plan.bit_identical
    assert {b.code for b in plan.blockers} == {"cpu-differs", "driver-differs"}
    assert any("rank 1 has avx2, the spare on n4 has avx512" in b.text for b in plan.blockers)


@pytest.mark.parametrize("there", ["", "new1"], ids=["older", "newer"])
def test_a_spare_with_other_code_of_the_agent_is_refused_before_anybody_confirms(there: str) -> None:
    facts = {"agent_code": there} if there else {}
    with pytest.raises(
        Refused, match="the spare on n4 runs other code of gridctl-agent than rank 1"
    ) as caught:
        built(report(1, facts={"agent_code": "old1"}), fleet(n4={"spares": [spare(facts=facts)]}))
    assert caught.value.code == "agent-code-differs"


@pytest.mark.parametrize(
    ("rank_has", "spare_has", "carried", "named"),
    [
        ({"LOSS_SCALE": "aa"}, {}, {}, "LOSS_SCALE"),
        ({"LOSS_SCALE": "aa"}, {"LOSS_SCALE": "bb"}, {}, "LOSS_SCALE"),
        ({}, {"NCCL_ALGO": "aa"}, {}, "NCCL_ALGO"),
        ({"LOSS_SCALE": "aa"}, {"LOSS_SCALE": "bb"}, {"LOSS_SCALE": "0.7"}, ""),
        ({"LOSS_SCALE": "aa"}, {"LOSS_SCALE": "aa"}, {}, ""),
        ({"A\x1b[2J\n": "aa"}, {}, {}, "A\\\\x1b\\[2J\\\\n"),
        ({f"V{number}": "aa" for number in range(9)}, {}, {}, "V0, V1, V2, V3, V4, V5 and 3 more"),
        ({"=": "aa"}, {"LR": "aa"}, {}, "LR, too many to tell them singly"),
        (None, {}, {}, "rank 1 does not tell"),
        ({}, None, {}, "the spare on n4 does not tell"),
    ],
)
def test_variables_that_a_script_would_find_otherwise_are_named_before_anybody_confirms(
    rank_has: dict[str, str] | None, spare_has: dict[str, str] | None, carried: dict[str, str], named: str
) -> None:
    nodes = fleet(n4={"spares": [spare(environment=spare_has)]})
    plan = built(
        report(1, environment=rank_has), nodes, start=msgspec.structs.replace(launch(1), env=carried)
    )
    assert plan.bit_identical == (not named)
    assert [b.code for b in plan.blockers] == ["environment"] * bool(named)
    for blocker in plan.blockers:
        assert re.search(named, blocker.text)
        assert not blocker.fatal
    text = msgspec.json.encode(plan)
    assert b'"aa"' not in text
    assert b"0.7" not in text


def test_what_may_be_a_secret_is_neither_carried_nor_compared_and_the_plan_says_so() -> None:
    plan = built(report(1), start=msgspec.structs.replace(launch(1), withheld=2))
    assert plan.bit_identical
    assert any(
        note.startswith("2 environment variable(s) of rank 1 look like secrets") for note in plan.notes
    )


def built(
    said: SessionReport,
    nodes: dict[str, Node] | None = None,
    policy: Policy | None = None,
    start: LaunchSpec | None = None,
) -> Plan:
    nodes, policy = nodes or fleet(), policy or Policy()
    chosen = select(Request(node="n2"), nodes, policy)
    return build(chosen, [said], [start or launch(1)], nodes, policy, ids=("p", "h", "i"), now_unix_s=NOW)


def test_the_cost_is_said_before_anybody_confirms() -> None:
    cost = plan_for(fleet()).cost
    assert (cost.steps_lost, cost.state_bytes) == (0, 60_000_000)
    assert "estimate without a measurement" in cost.basis
    nodes, policy = fleet(), Policy()
    chosen = select(Request(node="n2"), nodes, policy)
    ids = ("p", "h", "i")
    rates = [(100_000_000, 200.0), (50_000_000, 50.0)]
    plan = build(chosen, [report(1)], [launch(1)], nodes, policy, ids=ids, now_unix_s=NOW, rates=rates)
    assert plan.cost.pause_s == pytest.approx(0.12)
    assert "2 earlier cuts here" in plan.cost.basis


# --------------------------------------------------------------------------------------------------
# Gates


PLAN = plan_for(fleet())
GATE = Gate(digest=PLAN.digest, who="ann", reason="ecc errors", typed="n2")


def code(call: Any) -> str:
    with pytest.raises(Refused) as caught:
        call()
    assert caught.value.code in MEANINGS
    return caught.value.code


def test_the_gate_wants_this_plan_a_name_and_a_reason() -> None:
    gates.check_gate(PLAN, GATE)
    gates.check_gate(PLAN, Gate(digest=PLAN.digest, who="ann", reason="r", yes=True))
    for wrong, expected in (
        ({"digest": "0" * 64}, "wrong-digest"),
        ({"reason": " "}, "not-confirmed"),
        ({"typed": "n1"}, "not-confirmed"),
        ({"typed": "", "yes": True, "reason": ""}, "not-confirmed"),
    ):
        assert (
            code(lambda wrong=wrong: gates.check_gate(PLAN, msgspec.structs.replace(GATE, **wrong)))
            == expected
        )
    changed = msgspec.structs.replace(PLAN, node="n3")
    assert code(lambda: gates.check_gate(changed, GATE)) == "wrong-digest"


def test_an_old_plan_and_one_whose_ground_has_shifted_are_refused() -> None:
    gates.check_fresh(PLAN, NOW + 299, fleet())
    assert code(lambda: gates.check_fresh(PLAN, NOW + 300, fleet())) == "expired-plan"
    assert code(lambda: gates.check_fresh(PLAN, NOW - 3600, fleet())) == "expired-plan"  # a clock set back
    for changes, words in (
        ({"n2": {"ranks": [rank(1, epoch=1)]}}, "source of rank 1: was session s1 of lm, epoch 0"),
        ({"n4": {"spares": [spare(state="taken")]}}, "target of rank 1: was session spare, parked"),
        ({"n4": {"spares": []}}, "is gone"),
        ({"n1": {"ranks": [rank(0)], "boot_id": "other"}}, "node n1"),
        (
            {"n2": {"ranks": [rank(1)], "cordoned": True, "cordon_owner": "slurm"}},
            "cordon of n2: was no, is slurm",
        ),
        ({"n4": {"spares": [spare()], "quarantined": True}}, "quarantine of n4"),
    ):
        with pytest.raises(Refused) as caught:
            gates.check_fresh(PLAN, NOW + 1, fleet(**changes))
        assert caught.value.code == "stale-plan"
        assert words in caught.value.text
    assert code(lambda: gates.check_fresh(PLAN, NOW, blind(fleet(), "n1"))) == "stale-plan"
    gates.check_fresh(PLAN, NOW, fleet(n1={"ranks": [rank(0, step=99)]}))


def test_a_second_run_on_the_same_node_or_job_is_refused() -> None:
    run = Run(id="r0", plan="p0", incident="i0", node="n2", job="other", who="bob", state="held")
    assert code(lambda: gates.check_alone("n2", "lm", [run])) == "busy"
    job = msgspec.structs.replace(run, node="n9", job="lm", state="interrupted")
    assert code(lambda: gates.check_alone("n2", "lm", [job])) == "busy"
    over = msgspec.structs.replace(run, state="aborted")
    gates.check_alone("n2", "lm", [over, msgspec.structs.replace(run, node="n9")])
