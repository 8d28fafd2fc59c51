"""Plans as data: digest, dry run, references; the watch's judgement; the incident's timeline."""

import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from runbook_world import JOB, entries, fleet, launch, plan_for, rank, spare

from gridagent.journal import Record
from gridagent.wire import HandoverJoin, HandoverOpen, OpRequest, Specialise, StepEntry
from gridctl.control.incidents import Incidents
from gridctl.model.fleet import jobs
from gridctl.model.plans import Plan
from gridctl.runbook.dry import HIDDEN, dry_rest, dry_run, redacted
from gridctl.runbook.gates import digest
from gridctl.runbook.progress import Progress
from gridctl.runbook.references import launches_in, resolve
from gridctl.runbook.watch import judge

PLAN = plan_for(fleet())
URLS = {f"n{i}": f"https://10.0.0.{i}:7000" for i in range(1, 5)}


def test_the_digest_survives_the_journal_and_notices_any_change() -> None:
    again = msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(PLAN)), type=Plan)
    assert digest(again) == PLAN.digest == again.digest
    for change in ({"node": "n3"}, {"expires_unix_s": 1.0}, {"steps": PLAN.steps[:-1]}, {"who": "bob"}):
        assert digest(msgspec.structs.replace(PLAN, **change)) != PLAN.digest


def test_the_chair_is_a_survivor_away_from_source_and_target() -> None:
    assert PLAN.chair.role == "survivor"
    assert PLAN.chair.node == "n1"
    beside = fleet(n1={"ranks": []}, n2={"ranks": [rank(0), rank(1)]}, n4={"spares": [spare(), spare("b")]})
    assert plan_for(beside).chair.node == "n3"


def test_every_call_carries_what_its_agent_expects() -> None:
    launches = {ref["sha256"]: msgspec.to_builtins(launch(1)) for s in PLAN.steps for c in s.calls
                for ref in launches_in(c.args)}  # fmt: skip
    results = {"open": [{"store_host": "h", "store_port": 1, "nonce": "n"}]}
    kinds = {"handover.specialise": Specialise, "handover.open": HandoverOpen, "handover.join": HandoverJoin}
    for step in PLAN.steps:
        for call in step.calls:
            args = resolve(call.args, results, launches)
            if kind := kinds.get(call.kind):
                msgspec.convert(args, kind)
            msgspec.json.encode(
                OpRequest(id="x", run="r", fence=1, holder="h", who="w", kind=call.kind, args=args)
            )
    join = next(step for step in PLAN.steps if step.name == "join")
    assert len(join.calls) == 4  # two survivors, the source, the target
    assert {call.args["me"]["role"] for call in join.calls} == {"survivor", "source", "target"}


def test_a_dry_run_of_the_rest_has_what_is_left_in_that_direction() -> None:
    begun = Progress(started=("preflight", "engage", "cordon"), done={"preflight": [], "engage": []})
    on = [call for call in dry_rest(PLAN, begun, URLS, back=False) if call.kind]
    assert on[0].step == "cordon"
    assert {call.when for call in on} == {"do"}
    assert [call.step for call in on] == [c.step for c in dry_run(PLAN, URLS) if c.kind and c.when == "do"][
        1:
    ]
    back = dry_rest(PLAN, begun, URLS, back=True)
    assert [call.step for call in back] == ["cordon", "engage", "engage", "engage", "engage"]
    turned = msgspec.structs.replace(begun, undoing=True, undone=frozenset({"cordon"}))
    assert {call.step for call in dry_rest(PLAN, turned, URLS, back=False)} == {"engage"}


def test_a_command_line_stands_neither_in_the_plan_nor_in_a_dry_run() -> None:
    shown = dry_run(PLAN, URLS)
    for text in (msgspec.json.encode(PLAN), msgspec.json.encode(shown)):
        assert b"--token" not in text
        assert b"train.py" not in text
    assert any(call.url == f"{URLS['n2']}/v1/launch?job={JOB}&rank=1" for call in shown)
    kinds = [call.kind for call in shown if call.method == "POST" and call.when == "do" and call.kind]
    assert kinds == [call.kind for step in PLAN.steps for call in step.calls]
    undo = [call.kind for call in shown if call.when == "undo"]
    assert undo[0] == "handover.abort"
    assert undo[-1] == "run.end"
    assert sum(call.url.endswith("/v1/lease") for call in shown) == 4


def test_secrets_are_hidden_wherever_they_stand() -> None:
    args = {"env": {"HF_TOKEN": "x", "LANG": "C"}, "list": [{"api_key": "y"}]}
    assert redacted(args) == {"env": {"HF_TOKEN": HIDDEN, "LANG": "C"}, "list": [{"api_key": HIDDEN}]}


def test_the_newest_living_claim_holds_a_rank() -> None:
    nodes = fleet(
        n2={"ranks": [rank(1, state="frozen")]},
        n4={"ranks": [rank(1, session="spare", epoch=1)], "spares": []},
    )
    found = jobs(nodes.values())[0]
    assert [(r.rank, r.node, r.state) for r in found.ranks] == [
        (0, "n1", "training"),
        (1, "n4", "training"),
        (2, "n3", "training"),
    ]


BAND = {0: entries(20)}


def test_the_watch_finds_what_left_the_band() -> None:
    assert judge(BAND, {0: entries(5)}).problem == ""
    assert "loss is not a finite" in judge(BAND, {0: entries(5, loss=math.nan)}).problem
    assert "loss is not a finite" in judge(BAND, {0: entries(5, loss=None)}).problem
    assert "gradient norm is 4.1" in judge(BAND, {0: entries(5, grad_norm=4.1)}).problem
    assert judge({0: entries(20, loss=None, grad_norm=None)}, {0: entries(5, None, None)}).problem == ""
    assert judge({}, {0: entries(5)}).problem == ""
    slow = [StepEntry(i, 0.0, 9.0, 2.0, 1.0) for i in range(5)]
    assert judge(BAND, {0: slow}).problem == ""
    assert "steps take 9 s" in judge(BAND, {0: slow}).note


@given(
    band=st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1),
    new=st.lists(st.one_of(st.none(), st.floats()), min_size=1),
)
def test_a_gradient_norm_is_judged_as_its_slow_twin_says(band: list[float], new: list[float | None]) -> None:
    before = {0: [StepEntry(i, 0.0, 0.1, 1.0, norm) for i, norm in enumerate(band)]}
    after = {0: [StepEntry(i, 0.0, 0.1, 1.0, norm) for i, norm in enumerate(new)]}
    limit = 4 * sorted(band)[-1]
    bad = any(norm is None or math.isnan(norm) or norm > limit for norm in new)
    assert bool(judge(before, after).problem) == bad


def test_a_timeline_is_told_in_the_order_of_what_happened() -> None:
    incidents = Incidents()

    def take(seq: int, kind: str, /, **data: object) -> None:
        record = {"incident": "i1", "node": "n2", **data}
        incidents.take(
            Record(seq=seq, t_unix_s=float(seq), kind=kind, actor="a", data=record, prev="", hash="")
        )

    take(1, "finding", type="finding", kind="early", device="gpu:0")
    take(2, "incident", state="open", kind="ecc", title="ecc on gpu:0 of n2")
    take(3, "finding", type="finding", kind="ecc", device="gpu:0", why=["many"])
    take(4, "decision", type="decision", kind="ecc", decision="swap_now", why=["too many"])
    take(5, "plan", plan=msgspec.to_builtins(PLAN))
    take(6, "gate", who="ann", plan="p1", reason="r", typed="n2")
    take(7, "run", run="r1", state="running")
    take(9, "run", run="r1", state="done", text="")
    take(10, "note", run="r1", phase="cut", rank=1, t_unix_s=8.0)
    take(11, "incident", state="closed", kind="ecc", title="run r1 is done")
    found = incidents.get("i1")
    assert found is not None
    assert [moment.kind for moment in found.timeline] == [
        "incident",
        "finding",
        "decision",
        "plan",
        "gate",
        "run",
        "note",
        "run",
        "incident",
    ]
    assert (found.state, found.job, found.plans, found.runs) == ("closed", "lm", ["p1"], ["r1"])
    assert found.timeline[3].what == "plan p1: rank 1 -> n4"
    assert incidents.open_on("n2") is None
