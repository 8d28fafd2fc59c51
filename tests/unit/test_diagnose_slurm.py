"""Slurm's states in all spellings, what stands in reasons, and who may release whose hold."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridctl.detect.diagnose.slurm import slurm
from gridctl.detect.diagnose.slurm_events import slurm_events
from gridctl.detect.diagnose.slurm_states import BASES, FLAGS, SUFFIXES, parse_state
from gridctl.model.diagnosis import Diagnosis, Material

STATES = ("slurm_states", "none")
REBOOT = ("reboot_failed", "manual_review")


def brief(found: list[Diagnosis]) -> list[tuple[str, str]]:
    assert not any(one.preempt_job for one in found)
    return [(one.kind, one.action) for one in found]


def of(*texts: str) -> list[Diagnosis]:
    return list(slurm([Material(f"m{n}", text) for n, text in enumerate(texts)]))


def table(found: list[Diagnosis]) -> dict[str, dict[str, Any]]:
    return {event["node"]: event for one in found if one.kind == "slurm_states" for event in one.events}


@pytest.mark.parametrize(
    ("text", "base", "flags"),
    [
        ("idle", "IDLE", []),
        ("IDLE+DRAIN", "IDLE", ["DRAIN"]),
        ("DOWN*+DRAIN", "DOWN", ["NOT_RESPONDING", "DRAIN"]),
        ("mix-", "MIXED", ["PLANNED"]),
        ("mixed#", "MIXED", ["POWERING_UP"]),
        ("alloc@", "ALLOCATED", ["REBOOT_REQUESTED"]),
        ("allocated+", "ALLOCATED", []),
        ("drng^", "UNKNOWN", ["DRAIN", "REBOOT_ISSUED"]),
        ("inval", "UNKNOWN", ["INVALID_REG"]),
        ("MIXED+CLOUD+POWER_DOWN", "MIXED", ["CLOUD", "POWER_DOWN"]),
        ("IDLE+CLOUD+POWERED_DOWN", "IDLE", ["CLOUD", "POWERED_DOWN"]),
        ("idle~", "IDLE", ["POWERED_DOWN"]),
        ("IDLE+SOMETHING_NEW", "IDLE", ["SOMETHING_NEW"]),
    ],
)
def test_a_state_is_a_base_and_flags(text: str, base: str, flags: list[str]) -> None:
    state = parse_state(text)
    assert state is not None
    assert (state.base, list(state.flags)) == (base, flags)
    as_list = parse_state(text.upper().split("+"))
    assert as_list is not None
    assert as_list.base == base


def test_every_word_and_suffix_of_slurm_is_known() -> None:
    for word in (*BASES, *FLAGS):
        assert parse_state(word) is not None
        for suffix in SUFFIXES:
            assert parse_state(word.lower() + suffix) is not None
    for no in ("", "running", "RUNNING+COMPLETED", "a b", 5, None, {"a": 1}, ["x"], "+", "idle" * 200):
        assert parse_state(no) is None
    empty = parse_state([])
    assert empty is not None
    assert empty.base == "UNKNOWN"


def test_what_a_state_allows() -> None:
    def facts(text: str) -> tuple[bool, bool, bool]:
        state = parse_state(text)
        assert state is not None
        return state.available, state.drained, state.draining

    assert facts("idle") == (True, False, False)
    assert facts("IDLE+CLOUD") == (True, False, False)
    for text in (
        "idle*",
        "idle$",
        "IDLE+PLANNED",
        "IDLE+RESERVED",
        "inval",
        "ALLOCATED",
        "DOWN",
        "idle~",
        "unk*",
    ):
        assert facts(text) == (False, False, False)
    for text in ("IDLE+DRAIN", "drain", "drained*", "DOWN+DRAIN+NOT_RESPONDING"):
        assert facts(text) == (False, True, False)
    for text in ("MIXED+DRAIN", "drng", "draining@", "ALLOCATED+DRAIN"):
        assert facts(text) == (False, False, True)


ONE_LINE = (
    "NodeName={name} Arch=x86_64 CPUTot=96 Gres=gpu:b200:4 OS=Linux 6.1.0-9 #1 SMP State: odd 2026  "
    "RealMemory=9 "
    "State={state} Weight=1 Partitions=p CfgTRES=cpu=96,gres/gpu=4 AllocTRES= {reason}"
)


def shown(name: str, state: str, reason: str = "") -> str:
    return ONE_LINE.format(name=name, state=state, reason=f"Reason={reason}" if reason else "") + "\n"


def in_blocks(text: str) -> str:
    """As scontrol prints it without -o: one record over several indented lines."""
    line = text.rstrip("\n")
    for key in (
        "CPUTot=",
        "Gres=",
        "OS=",
        "RealMemory=",
        "State=",
        "Partitions=",
        "CfgTRES=",
        "AllocTRES=",
        "Reason=",
    ):
        line = line.replace(f" {key}", f"\n   {key}", 1)
    return line + "\n\n"


@pytest.mark.parametrize("form", [str, in_blocks])
def test_scontrol_in_both_forms(form: Any) -> None:
    text = form(shown("n1", "IDLE+DRAIN", "NHC: nvlink, State=IDLE: bad [root@2026-02-03T04:05:06]"))
    text += form(
        shown("n2", "MIXED+DRAIN", "see ticket: A-1 [x] [carol@2026-02-03T04:05:06] Comment=a [b@c]")
    )
    text += form(shown("n3", "ALLOCATED"))
    nodes = table(of(text))
    assert (nodes["n1"]["drained"], nodes["n1"]["reason_user"]) == (True, "root")
    assert nodes["n1"]["reason"] == "NHC: nvlink, State=IDLE: bad"
    assert (nodes["n2"]["draining"], nodes["n2"]["reason_user"]) == (True, "carol")
    assert nodes["n2"]["reason"] == "see ticket: A-1 [x]"
    assert (nodes["n3"]["running"], nodes["n3"]["available"]) == (True, False)


def test_a_reason_cannot_pose_as_another_record_or_field() -> None:
    evil = (
        "x State=IDLE NodeName=n9 gres/gpu count reported lower than configured (0 < 4) "
        "[eve@2026-02-03T04:05:06]"
    )
    found = of(shown("n1", "DOWN+DRAIN", evil))
    assert brief(found) == [STATES]
    assert table(found)["n1"]["base"] == "DOWN"
    assert list(table(found)) == ["n1"]


@pytest.mark.parametrize(
    "text",
    [
        "a1|idle\na2|mix-\na3|drng*\n",
        "a1 idle\na2   mixed-\na3\tdraining*\n",
        "idle,a1\nmix-,a2\ndrng*,a3\n",
        "NODELIST STATE\na1 idle\na2 mix-\na3 drng*\n",
        "a1|idle||\na2|mix-|none|x\na3|drng*|bad fan [eve@2026-02-03T04:05:06]|y\n",
        "STATE|NODELIST\nidle|a1\nmix-|a2\ndrng*|a3\n",
        "PARTITION AVAIL TIMELIMIT NODES STATE NODELIST\np up infinite 1 idle a1\np up infinite 1 "
        "mix- a2\np up 1 1 drng* a3\n",
        "Tue Feb 03 04:05:06 2026\nNODELIST NODES PARTITION STATE CPUS REASON\na1 1 p idle 9 "
        "none\na2 1 p mix- 9 none\n"
        "a3 1 p drng* 9 bad fan here\n",
        json.dumps(
            {
                "nodes": [
                    {"name": "a1", "state": ["IDLE"]},
                    {"name": "a2", "state": "mixed", "state_flags": ["PLANNED"]},
                    {"hostname": "a3", "state": ["MIXED", "DRAIN", "NOT_RESPONDING"]},
                ]
            }
        ),
        '{"node": "a1", "state": "IDLE"}\n{"node": "a2", "state": "MIXED+PLANNED"}\n'
        '{"node": "a3", "state": "drng*"}',
    ],
)
def test_sinfo_and_the_rest_service(text: str) -> None:
    found = of(text)
    assert brief(found) == [STATES]
    nodes = table(found)
    assert [nodes[name]["available"] for name in ("a1", "a2", "a3")] == [True, False, False]
    assert nodes["a3"]["draining"]


def test_ranges_of_names_and_numbers_in_wrappers() -> None:
    assert list(table(of("NODELIST STATE\nc[003,020-022] down*\n"))) == ["c003", "c020", "c021", "c022"]
    assert len(table(of("NODELIST STATE\nc[0-99999999] idle\n"))) <= 4097
    rest = {
        "name": "a1",
        "state": ["MIXED"],
        "gres_used": "gpu:h200:3(IDX:0-1,5)",
        "reason_changed_at": {"set": True, "infinite": False, "number": 5},
        "reason": "seen",
        "reason_set_by_user": "dan",
    }
    entry = table(of(json.dumps({"meta": {"x": [1]}, "nodes": [rest, {"name": "a2", "state": []}]})))
    assert (entry["a1"]["gpu_idx_used"], entry["a1"]["reason_user"]) == ([0, 1, 5], "dan")
    assert entry["a2"]["base"] == "UNKNOWN"


def test_a_table_of_state_words_without_nodes() -> None:
    rows = [
        {"state": "IDLE+CLOUD+POWERING_UP", "next": "wait"},
        {"state": "DOWN+POWERED_DOWN", "next": "resume"},
    ]
    found = of("\n".join(json.dumps(row) for row in rows))
    assert [(one.kind, one.fault) for one in found] == [("slurm_states", "config")]
    assert [event["flags"] for event in found[0].events] == [["CLOUD", "POWERING_UP"], ["POWERED_DOWN"]]


COUNT = "gres/gpu count reported lower than configured ({seen} < {want})"


def test_missing_gpus_by_how_many_are_left() -> None:
    lost = shown("n1", "IDLE+DRAIN", COUNT.format(seen=3, want=4) + " [slurm@2026-02-03T04:05:06]")
    none = shown("n2", "IDLE+DRAIN", COUNT.format(seen=0, want=4) + " [slurm@2026-02-03T04:05:06]")
    both = of(lost + none)
    assert brief(both) == [("gpu_count_mismatch", "per_node"), STATES]
    assert both[0].event_count == 2
    assert [(e["node"], e["seen"], e["fault"]) for e in both[0].events] == [
        ("n1", 3, "node"),
        ("n2", 0, "config"),
    ]
    assert brief(of(lost))[0] == ("gpu_count_mismatch", "drain_and_diagnose")
    assert brief(of(none))[0] == ("gpu_count_mismatch", "fix_config")
    cut = "REASON USER TIMESTAMP NODELIST\ngres/gpu count repor slurm 2026-02-03T04:05:06 n[1-2]\n"
    assert brief(of(cut)) == [("gpu_count_mismatch", "manual_review")]


def test_a_changed_count_of_slices_is_the_configuration() -> None:
    log = (
        "[2026-02-03T04:05:06.101] {e}_node_config_validate: gres/gpu: Count changed on node g5 (7 != 5)\n"
        "[2026-02-03T04:05:06.102] error: Setting node g5 state to INVAL with reason:"
        + COUNT.format(seen=5, want=7)
    )
    for text in (
        log.format(e=""),
        log.format(e="error: "),
        log.partition("\n")[0].format(e=""),
        log.partition("\n")[2],
    ):
        found = of(text)
        assert brief(found) == [("config_mismatch", "fix_config")]
        assert found[0].events == [{"node": "g5", "seen": 5, "want": 7}]
    zero = log.format(e="").replace("!= 5", "!= 0").replace("(5 <", "(0 <")
    assert brief(of(zero)) == [("gpu_count_mismatch", "fix_config")]
    mig = shown("g5", "IDLE+DRAIN", COUNT.format(seen=5, want=7)).replace("gpu:b200:4", "gpu:1g.23gb:7")
    assert brief(of(mig))[0] == ("config_mismatch", "fix_config")
    said = (
        "[2026-02-03T04:05:06.101] job 5 said: _node_config_validate: gres/gpu: Count changed on "
        "node g5 (7 != 5)"
    )
    assert of(said) == []


REASONS = [
    ("new kernel : reboot issued : reboot timed out", "root", "2026-02-03T04:05:06", "k4"),
    ("fans, noisy : reboot issued : reboot timed out", "ann", "2026-02-03T04:05:07", "k[07-09]"),
    ("Low RealMemory (reported:96000 < 100.00% of configured:515000)", "slurm", "2026-02-03T04:05:08", "k30"),
]


@pytest.mark.parametrize(
    "head",
    ["REASON USER TIMESTAMP NODELIST", "NODELIST REASON USER TIMESTAMP", "USER TIMESTAMP NODELIST REASON"],
)
@pytest.mark.parametrize("bar", [" ", "|"])
def test_a_reboot_that_timed_out_in_any_order_of_columns(head: str, bar: str) -> None:
    names = head.split()
    rows = [dict(zip(("REASON", "USER", "TIMESTAMP", "NODELIST"), row, strict=True)) for row in REASONS]
    text = "\n".join([bar.join(names), *(bar.join(row[name] for name in names) for row in rows)])
    found = of(text)
    assert brief(found)[0] == REBOOT
    assert found[0].events == [
        {"nodes": ["k4"], "purpose": "new kernel", "stage": "timed_out"},
        {"nodes": ["k07", "k08", "k09"], "purpose": "fans, noisy", "stage": "timed_out"},
        {"node": "k30", "kind": "memory_missing", "reported_mb": 96000, "configured_mb": 515000},
    ]
    assert brief(found)[1] == ("config_mismatch", "drain_and_diagnose")


def test_other_reasons() -> None:
    def of_reason(reason: str) -> list[tuple[str, str]]:
        return brief(of(shown("n1", "IDLE+DRAIN", reason + " [slurm@2026-02-03T04:05:06]")))[:-1]

    assert of_reason("update : reboot issued") == [("slurm_states", "observe")]
    assert of_reason("update : reboot complete") == []
    assert of_reason("ResumeTimeout reached") == [REBOOT]
    assert of_reason("Kill task failed") == [("kill_task_failed", "drain_and_diagnose")]
    assert of_reason("somebody wrote: Kill task failed") == []
    assert of_reason("Low RealMemory (reported:510000 < 100.00% of configured:515000)") == [
        ("config_mismatch", "fix_config")
    ]
    assert of_reason("Not responding") == []


def events(*rows: dict[str, Any]) -> list[Diagnosis]:
    return list(slurm_events([Material("m", "\n".join(json.dumps(row) for row in rows))]))


def told(node: str, *verbs: str, **more: Any) -> list[dict[str, Any]]:
    return [{"day": n, "host": node, "event": verb, **more} for n, verb in enumerate(verbs)]


def test_a_node_that_comes_back_bad_again_and_again_is_a_lemon() -> None:
    bad = told("n5", "drained", "resumed", "job_failed", "drained", "resumed", "job_failed")
    found = events(*bad, *told("n6", "job_failed"))
    assert brief(found) == [("lemon_node", "quarantine")]
    assert found[0].events[0] | {"node": "n5", "other": {"n6": "watch"}} == found[0].events[0]
    assert brief(events(*told("n5", "drain", "undrain", "crash", "drain", "online", "drain"))) == [
        ("lemon_node", "quarantine")
    ]
    renamed = [{"t": 9 * n, "nodeName": "n5", "action": row["event"].upper()} for n, row in enumerate(bad)]
    assert brief(events(*renamed)) == [("lemon_node", "quarantine")]


def test_records_out_of_order_are_put_in_order() -> None:
    bad = told("n5", "drained", "resumed", "job_failed", "drained", "resumed", "job_failed")
    assert brief(events(*reversed(bad))) == [("lemon_node", "quarantine")]


def test_near_misses_of_a_lemon() -> None:
    assert brief(events(*told("n5", "drained", "resumed", "job_failed"))) == [("lemon_node", "observe")]
    assert brief(events(*told("n5", "job_failed", "job_failed", "job_failed"))) == [("lemon_node", "observe")]
    planned = told("n5", "drained", "resumed", "drained", "resumed", "drained", reason="firmware upgrade")
    assert events(*planned) == []
    late = told("n5", "resumed", "job_failed", "resumed", "job_failed")
    for n, row in enumerate(late):
        row["day"] = 50 * n
    assert brief(events(*late)) == [("lemon_node", "observe")]
    cancelled = told("n5", "resumed", "job_failed", "resumed", "job_failed", sig=15)
    assert events(*cancelled) == []


def hold(by: str, event: str, reason: str = "", node: str = "w3") -> dict[str, Any]:
    return {"t": 1, "node": node, "event": event, "by": by, "reason": reason}


KEPT = [("drain_ownership", "keep_drained")]


def test_a_monitor_releases_only_its_own_hold() -> None:
    human, monitor = hold("erika", "drain", "bad smell"), hold("nhc", "drain", "NHC: hung")
    found = events(human, monitor, {"t": 9, "node": "w3", "event": "nhc_ok"})
    assert brief(found) == KEPT
    assert found[0].events[0]["reasons_stack"] == ["bad smell", "NHC: hung"]
    assert (found[0].events[0]["owner"], found[0].events[0]["final_state"]) == ("erika", "drained")
    assert brief(events(human, hold("healthchecker", "resumed"))) == KEPT
    assert (
        brief(events(human, hold("root", "drain", "NHC: hung"), hold("root", "resume", "NHC: fine"))) == KEPT
    )


def test_who_may_release_what() -> None:
    human, monitor = hold("erika", "drain", "bad smell"), hold("nhc", "drain", "NHC: hung")
    assert events(monitor, hold("nhc", "ok"), hold("nhc", "resume")) == []
    assert events(human, hold("erika", "resume")) == []
    assert events(human, monitor, hold("erika", "undrain"), hold("nhc", "ok")) == []
    assert events(human, hold("nhc", "ok", node="w4")) == []
    assert events(hold("", "drain", "x"), {"node": "w3", "event": "other"}) == []


KEYS = st.sampled_from(
    "t d node event by reason state state_flags nodes name gres_used gres bulk sig action".split()
)
WORDS = st.sampled_from(
    ["drain", "resume", "job_failed", "nhc_ok", "IDLE+DRAIN", "n[1-9]", COUNT, "a : reboot issued"]
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6), WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=5)),
    max_leaves=10,
)


@given(st.lists(st.dictionaries(KEYS, JSON, max_size=6), max_size=6))
def test_no_json_makes_these_layers_raise(rows: list[dict[str, Any]]) -> None:
    for text in ("\n".join(json.dumps(row) for row in rows), json.dumps(rows, indent=1)):
        for layer in (slurm, slurm_events):
            list(layer([Material("m", text)]))


PIECES = st.sampled_from(
    [
        *("NodeName=a[1-3] ", "State=IDLE", " Reason=", COUNT, " [slurm@2026-02-03T04:05:06]", "\n"),
        *("REASON NODELIST", "|", "idle*", "n1 ", " : reboot timed out", "gres/gpu: "),
        *("Count changed on node x (1 != 2)", "[2026-02-03T04:05:06] "),
    ]
)


@given(st.lists(st.one_of(PIECES, st.text(max_size=12)), max_size=40).map("".join))
def test_no_text_makes_these_layers_raise(text: str) -> None:
    for layer in (slurm, slurm_events):
        list(layer([Material("m", text)]))
