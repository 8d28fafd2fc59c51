"""Plans that reset or reboot, and the engine with them: evidence first or a word why not, never twice."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runbook_world import NOW, World, fleet, node, plan_for, rank, spare, status

from gridagent.wire import ResetReport
from gridctl.errors import Refused
from gridctl.model.actions import ACTIONS
from gridctl.model.fleet import Node, Sample
from gridctl.model.plans import Call, Gate, Plan, Request
from gridctl.model.policy import Policy
from gridctl.model.runs import ENDS, Incident, Run
from gridctl.runbook import gates, reset
from gridctl.runbook.dry import dry_run
from gridctl.runbook.events import BackAsked, Effect, Event, Halted, Observe, Observed, OpEnded, Started
from gridctl.runbook.evidence import LOST_BY
from gridctl.runbook.spares import Claims

TAKEN = {"node": "n5", "state": "collected", "id": "ev-1", "who": "ann", "file": "/e/n5.tar.gz"}
START = Started("ann", accept=True)


def incident(*evidence: dict[str, Any]) -> Incident:
    return Incident(id="i1", kind="gpu_lost", state="open", title="t", node="n5", evidence=[*evidence])


def idle(**more: Any) -> Node:
    told: dict[str, Any] = {"cordoned": True, "cordon_owner": "gridctl", "resets": ["gpu", "reboot"]}
    return node(status("n5", **{**told, **more}))


WHICH = {"uuid": "GPU-1", "pci": "0000:2a:00.0"}


def samples(**values: Any) -> dict[str, Sample]:
    return {"gpu:1": Sample(NOW, {"temp_c": 40.0, "recovery_action": 1.0, "lost": 0, **values}, WHICH)}


def plan(
    *devices: str,
    it: Node | None = None,
    about: Incident | None = None,
    policy: Policy | None = None,
    **more: Any,
) -> Plan:
    return reset.build(
        Request(node="n5", devices=[*devices], who="ann", runbook="reset", **more),
        {**fleet(), "n5": it or idle()},
        samples(),
        about or incident(),
        policy or Policy(),
        plan_id="p1",
        now_unix_s=NOW,
    )


def names(made: Plan) -> list[str]:
    return [step.name for step in made.steps]


def test_evidence_is_a_step_unless_it_was_taken_or_a_person_does_without() -> None:
    assert names(plan("gpu:1")) == ["engage", "evidence", "reset", "back", "end"]
    taken = plan("gpu:1", about=incident(TAKEN))
    assert names(taken) == ["engage", "reset", "back", "end"]
    assert any("/e/n5.tar.gz" in note for note in taken.notes)
    waived = plan("gpu:1", waiver="it burns")
    assert names(waived) == ["engage", "reset", "back", "end"]
    assert any("on the word of ann: it burns" in note for note in waived.notes)
    assert waived.digest != taken.digest
    elsewhere = plan("gpu:1", about=incident({**TAKEN, "node": "n1"}, {**TAKEN, "state": "failed"}))
    assert "evidence" in names(elsewhere)
    assert names(plan(it=idle(cordoned=False)))[1] == "cordon"


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"ranks": [rank(0)]}, "not-idle"),
        ({"ranks": [rank(0, state="frozen")]}, "not-idle"),
        ({"ranks": [rank(0, connected=False)]}, "not-idle"),
        ({"spares": [spare()]}, "not-idle"),
        ({"complete": False}, "not-idle"),
        ({"frozen": ["fleet"]}, "frozen"),
        ({"resets": ["reboot"]}, "no-command"),
    ],
)
def test_a_node_that_is_used_frozen_or_has_no_command_is_not_planned_for(
    more: dict[str, Any], code: str
) -> None:
    with pytest.raises(Refused) as refused:
        plan("gpu:1", it=idle(**more))
    assert refused.value.code == code


def test_a_silent_node_is_unknown_and_not_reset() -> None:
    with pytest.raises(Refused, match="unknown, which is not the same as failed") as refused:
        plan(it=msgspec.structs.replace(idle(), reachable=False, error="timeout"))
    assert refused.value.code == "node-unreachable"


def test_a_job_that_stands_for_want_of_a_rank_there_comes_first() -> None:
    dead = idle(ranks=[rank(2, state="lost")])
    others = {f"n{i + 1}": {"ranks": [rank(i, state="standing")]} for i in (0, 1)}
    nodes = {**fleet(**others, n3={"ranks": []}), "n5": dead}
    wish = Request(node="n5", who="ann", runbook="reset")
    with pytest.raises(Refused, match="stands for want of a rank") as refused:
        reset.build(wish, nodes, {}, incident(), Policy(), plan_id="p", now_unix_s=NOW)
    assert refused.value.code == "job-stands"


@pytest.mark.parametrize("devices", [["gpu:0", "gpu:1"], ["nic:a"], ["gpu:7"]])
def test_a_device_that_nobody_could_see_again_is_refused(devices: list[str]) -> None:
    with pytest.raises(Refused):
        plan(*devices)


def test_a_plan_is_gated_as_others_are_and_says_what_it_takes_away() -> None:
    made = plan("gpu:1")
    nodes = {"n5": idle()}
    gates.check_gate(made, Gate(who="ann", digest=made.digest, typed="n5", reason="r"))
    gates.check_fresh(made, NOW + 299, nodes)
    with pytest.raises(Refused, match="`gridctl reset plan n5 --gpu 1`"):
        gates.check_fresh(made, NOW + 300, nodes)
    with pytest.raises(Refused, match="boot boot5"):
        gates.check_fresh(made, NOW, {"n5": idle(boot_id="b9")})
    assert any("no way back" in note and LOST_BY[made.action] in note for note in made.notes)
    assert {made.action, plan().action} <= LOST_BY.keys() & {*ACTIONS}
    calls = dry_run(made, {"n5": "https://n5", "n1": "https://n1"})
    assert [call.kind for call in calls if call.when == "do" and call.kind] == [
        "evidence.collect",
        "node.reset",
        "run.end",
    ]


def test_two_resets_of_two_nodes_have_nothing_in_common_but_one_node_has_one_run() -> None:
    run = Run(id="r1", plan="p1", incident="i1", node="n5", job="", who="ann", state="held")
    gates.check_alone("n1", "", [run])
    with pytest.raises(Refused, match="run r1 on node n5 is held"):
        gates.check_alone("n5", "lm", [run])
    swap = plan_for({**fleet(n4={"spares": []}), "n5": node(status("n5", spares=[spare()]))})
    with pytest.raises(Refused, match=r"run r1 \(gpu:1 of n5 is reset\) has n5"):
        gates.check_nodes(swap, Claims({"r1": plan("gpu:1")}))
    with pytest.raises(Refused, match=r"run r2 \(lm leaves n2\) has n5"):
        gates.check_nodes(plan("gpu:1"), Claims({"r2": swap}))


def test_an_action_names_its_command() -> None:
    assert reset.command_for("evacuate_and_reset_gpu", "n5", "gpu:3") == "gridctl reset plan n5 --gpu 3"
    assert reset.command_for("evacuate_and_reboot", "n5", "node") == "gridctl reset plan n5 --reboot"
    assert reset.command_for("drain_and_reset_gpu", "n5", "pci:0000:1a:00.0") == ""
    assert reset.command_for("replace_gpu", "n5", "gpu:3") == ""


# --------------------------------------------------------------------------------------------------


@dataclass
class Bench(World):
    """A world with one node to reset. Further words of its script: "exits" (with a status), "interrupted"
    (the agent ended in the middle, and it had its effect), "nothing" (likewise, and it had none)."""

    evidence: bool = False  #: was taken
    resets: int = 0
    heals: bool = True
    comes: bool = False  #: a spare is parked just before
    numbered: dict[str, str] = field(default_factory=lambda: WHICH)  #: which GPU has the number afterwards

    def nodes(self) -> dict[str, Node]:
        boot = "boot5" if self.plan.devices or not self.resets else "boot6"
        return {"n5": idle(boot_id=boot, now_unix_s=NOW + 1, spares=[spare()] if self.comes else [])}

    def _first(self, op: str, call: Call, what: str) -> OpEnded:
        if call.kind == "node.reset" and what in ("interrupted", "nothing"):
            self.effects.append(op)
            self.resets += what == "interrupted"
            return OpEnded(op, False, code="interrupted", text="the agent ended in the middle of it")
        if call.kind == "evidence.collect" and what == "fail":
            return OpEnded(op, False, code="evidence-failed", text="no room")
        return super()._first(op, call, what)

    def _effect(self, call: Call, what: str) -> Any:
        if call.kind == "evidence.collect":
            self.evidence = True
            return {"id": "ev-1"}
        if call.kind != "node.reset":
            return {}
        assert self.evidence or self.plan.waiver, "nothing is destroyed before evidence is taken"
        self.resets += what != "exits"
        report = ResetReport(status=3 if what == "exits" else 0, text="busy", t_unix_s=NOW)
        return msgspec.to_builtins(report)

    def hear(self) -> None:
        """From now on the agent answers, from its journal where it has begun."""
        op = "r1.reset.0"
        self.script[op] = "ok"
        del self.answers[op]
        if op in self.effects:
            self.answers[op] = OpEnded(op, True, value={"status": 0, "t_unix_s": NOW})

    def _answer(self, effect: Effect, *, late: bool) -> list[Event]:
        if not isinstance(effect, Observe) or (effect.after_s and late):
            return super()._answer(effect, late=late)
        told = samples(recovery_action=0.0 if self.resets and self.heals else 1.0)
        put = msgspec.structs.replace
        since = {name: put(s, t_unix_s=NOW + 0.5, about=self.numbered) for name, s in told.items()}
        about = incident(TAKEN) if self.evidence else incident()
        return [Observed(self.nodes(), since, about)]


def ends(bench: Bench) -> tuple[str, str]:
    bench.drive(START)
    return bench.progress().state, bench.progress().code


@pytest.mark.parametrize("devices", [["gpu:1"], []])
def test_a_run_takes_evidence_resets_and_sees_it_back(devices: list[str]) -> None:
    bench = Bench(plan(*devices))
    assert ends(bench) == ("done", "")
    assert (bench.resets, bench.evidence) == (1, True)
    assert bench.effects == ["r1.evidence.0", "r1.reset.0", "r1.end.0"]


@pytest.mark.parametrize("how", ["fail", "silent", "refuse"])
def test_without_evidence_the_run_ends_before_anything_was_destroyed(how: str) -> None:
    bench = Bench(plan("gpu:1"), {"r1.evidence.0": how})
    state, code = ends(bench)
    assert (state, bench.resets) == ("aborted", 0)
    assert code in ("evidence-failed", "node-unreachable", "busy")


def test_evidence_that_is_gone_when_it_counts_stops_it() -> None:
    """The plan was made when there was some; the journal of the incident says otherwise now."""
    bench = Bench(plan("gpu:1", about=incident(TAKEN)))
    assert ends(bench) == ("aborted", "no-evidence")
    assert bench.resets == 0


def test_who_comes_meanwhile_stops_it() -> None:
    bench = Bench(plan("gpu:1", waiver="w"), comes=True)
    assert ends(bench) == ("aborted", "not-idle")
    assert bench.resets == 0


@pytest.mark.parametrize(
    ("what", "code", "undone"),
    [("exits", "reset-failed", []), ("refuse", "busy", ["r1.cordon.undo1.0"])],
)
def test_a_command_that_fails_ends_the_run_and_the_node_stays_cordoned(
    what: str, code: str, undone: list[str]
) -> None:
    """Nobody may put work on what it has left; a command that was never run leaves all as it was."""
    bench = Bench(plan("gpu:1", waiver="w", it=idle(cordoned=False)), {"r1.reset.0": what})
    assert ends(bench) == ("aborted", code)
    assert [op for op in bench.effects if "cordon" in op] == ["r1.cordon.0", *undone]
    if what == "exits":
        said = "ended with status 3: busy. What it has done is not known, so the node stays cordoned"
        assert said in bench.progress().text


def test_the_gpu_that_the_plan_saw_is_meant_and_not_whichever_has_its_number() -> None:
    made = plan("gpu:1")
    (call,) = (call for step in made.steps for call in step.calls if call.kind == "node.reset")
    assert call.args == {"boot": "boot5", "device": "gpu:1", **WHICH}
    assert "gpu:1 is GPU-1 at 0000:2a:00.0" in made.notes
    bench = Bench(plan("gpu:1", waiver="w"), numbered={**WHICH, "uuid": "GPU-2"})
    assert ends(bench) == ("held", "not-back")
    assert "gpu:1 of n5 is another GPU now" in bench.progress().text


def test_a_gpu_whose_agent_died_in_it_waits_for_a_person_and_is_not_reset_again() -> None:
    bench = Bench(plan("gpu:1", waiver="w"), {"r1.reset.0": "interrupted"})
    assert ends(bench) == ("held", "outcome-unknown")
    before = len(bench.journal)
    bench.drive(BackAsked("bob", "", "rolled-back"), late=Halted("x", "y"), late_at=1)
    assert len(bench.journal) == before, "there is no way back from what may have been destroyed"
    assert ends(bench) == ("done", "")
    assert bench.effects.count("r1.reset.0") == 1


def test_a_gpu_whose_agent_says_nothing_is_asked_again_and_nobody_accepts_for_it() -> None:
    bench = Bench(plan("gpu:1", waiver="w"), {"r1.reset.0": "lost"})
    assert ends(bench) == ("held", "node-unreachable")
    assert ends(bench) == ("held", "node-unreachable"), "it still says nothing"
    bench.hear()
    assert ends(bench) == ("done", "")
    assert bench.resets == 1


def test_a_reboot_in_which_the_agent_died_is_known_by_the_boot() -> None:
    assert ends(Bench(plan(waiver="w"), {"r1.reset.0": "interrupted"})) == ("done", "")
    assert ends(Bench(plan(waiver="w"), {"r1.reset.0": "lost"})) == ("done", "")
    same = Bench(plan(waiver="w"), {"r1.reset.0": "nothing"})
    assert ends(same) == ("aborted", "reset-failed")
    assert "the same boot" in same.progress().text


def test_a_gpu_that_is_not_back_is_held_with_what_is_seen_and_then_left() -> None:
    bench = Bench(plan("gpu:1", waiver="w"), heals=False)
    assert ends(bench) == ("held", "not-back")
    assert "still asks for recovery action 1 of gpu:1" in bench.progress().text
    assert ends(bench) == ("failed", "not-back")
    healed = Bench(plan("gpu:1", waiver="w"), heals=False)
    healed.drive(START)
    healed.heals = True
    assert ends(healed) == ("done", "")


@pytest.mark.parametrize(
    ("values", "seen"),
    [
        ({"lost": 1}, "is lost"),
        ({"temp_c": None, "recovery_action": None, "lost": None}, "tells no value"),
        ({"recovery_action": None}, "is not told"),
        ({"recovery_action": "\x1b[31m"}, "is not told"),
        ({"recovery_action": 2.0}, "recovery action 2"),
    ],
)
def test_what_is_seen_of_a_gpu_that_is_not_back(values: dict[str, Any], seen: str) -> None:
    made = plan("gpu:1", waiver="w")
    report = msgspec.to_builtins(ResetReport(status=0, t_unix_s=NOW - 1))
    step = next(step for step in made.steps if step.name == "back")

    def look(found: dict[str, Sample]) -> str:
        context = reset.Context(
            plan=made, step=step, values=[], nodes={"n5": idle()}, samples=found, done={"reset": [report]}
        )
        problem = reset.CHECKS[step.verify](context)
        return problem.text if problem else ""

    assert seen in look(samples(**values))
    assert "told nothing since" in look({"gpu:1": Sample(NOW - 1, {"recovery_action": 0.0})})
    assert "told nothing since" in look({})
    assert look(samples(recovery_action=0.0)) == ""
    assert look({"gpu:1": Sample(NOW, {"temp_c": 40.0, "lost": 0})}) == "", "a driver without such a word"


PLANS = [
    plan(*d, waiver=w, it=i) for d in (["gpu:1"], []) for w in ("", "w") for i in (None, idle(cordoned=False))
]
HOW = st.sampled_from(["ok", "ok", "fail", "refuse", "lost", "silent", "exits", "interrupted", "nothing"])
OPS = ["r1.cordon.0", "r1.evidence.0", "r1.reset.0", "r1.end.0", "r1.engage.undo1.0", "r1.cordon.undo1.0"]


@given(
    made=st.sampled_from(PLANS),
    script=st.fixed_dictionaries({}, optional=dict.fromkeys(OPS, HOW)),
    crashes=st.lists(st.integers(0, 20), max_size=4),
    back_at=st.integers(0, 20),
    comes=st.booleans(),
)
def test_no_path_resets_without_evidence_or_a_waiver_and_none_resets_twice(
    made: Plan, script: dict[str, str], crashes: list[int], back_at: int, comes: bool
) -> None:
    """`Bench` itself asserts that evidence or a waiver is there; ids that repeat would show in `effects`."""
    bench = Bench(made, script, comes=comes)
    for crash in sorted(crashes):
        bench.crash_after = crash
        bench.drive(START, late=BackAsked("bob", "", "aborted"), late_at=back_at)
    bench.crash_after = 10**9
    if bench.to_the_end() == "held":
        assert bench.progress().code == "node-unreachable", "only the agent itself can say how it ended"
        bench.hear()
    assert bench.to_the_end() in ENDS
    assert bench.effects.count("r1.reset.0") <= 1
    assert bench.resets <= 1
    if "r1.reset.0" in bench.effects:
        assert bench.evidence or made.waiver
        assert not comes
    if bench.progress().state == "done":
        assert bench.resets == 1
