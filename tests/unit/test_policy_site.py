"""A site's own word on Xids: what it changes, everywhere alike, what no site can say, and clear errors."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from gridagent.wire import StreamRecord
from gridctl.cli.app import root
from gridctl.control.settings import detect_policy, load_policy
from gridctl.detect.diagnose import diagnose
from gridctl.detect.meaning import EVENT_NUMBERS
from gridctl.detect.policy import WHEN, builtin
from gridctl.detect.policy.rows import all_rows, uses
from gridctl.detect.policy.site import APPLICATIONS, OverrideError, actions, with_overrides
from gridctl.detect.watch import Watch
from gridctl.errors import ConfigError
from gridctl.home import Home
from gridctl.model.diagnosis import Material
from gridctl.model.findings import SEVERITIES, Decision, Finding, Output, WatchedNode
from gridctl.model.policy import Policy, XidOverride

LOST = "NVRM: Xid (PCI:0000:2a:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
LINK = (
    "NVRM: Xid (PCI:0000:2a:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 08 "
    "(0x004505c6 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)"
)
KEEP_79 = '[xid.79]\nreason = "ticket 12"\npreempt = false\n'


def home(tmp_path: Path, text: str) -> Home:
    (tmp_path / "policy.toml").write_text(text, encoding="utf-8")
    return Home.at(tmp_path)


def watched(watch: Watch, *lines: str) -> list[Output]:
    records = [
        StreamRecord(
            seq=n,
            boot="b",
            t_unix_s=100.0 + 60 * n,
            node="n1",
            kind="log",
            v={"source": "kmsg", "line": line},
        )
        for n, line in enumerate(lines)
    ]
    return [out for record in records for out in watch.feed(record)]


def decided(outputs: list[Output]) -> list[str]:
    return [out.kind for out in outputs if isinstance(out, Decision)]


def test_an_override_is_in_force_in_the_watchdog_and_in_diagnose(tmp_path: Path) -> None:
    policy = detect_policy(load_policy(home(tmp_path, KEEP_79)))
    outputs = watched(Watch(policy, [WatchedNode(name="n1")]), LOST)
    (found,) = [out for out in outputs if isinstance(out, Finding)]
    assert (found.kind, found.severity, found.preempt_job, found.when) == (
        "gpu_lost",
        "fatal",
        False,
        "after_job",
    )
    assert found.rule == "xid.79+site"
    assert decided(outputs) == []
    (diagnosis,) = diagnose([Material("dmesg", LOST)], policy)
    assert (diagnosis.kind, diagnosis.preempt_job, diagnosis.why.rule) == ("gpu_lost", False, "xid.79+site")
    assert diagnosis.why.source == "policy.toml: ticket 12"
    assert decided(watched(Watch(builtin(), [WatchedNode(name="n1")]), LOST)) == ["gpu_lost"]


def test_an_override_holds_for_a_line_whose_text_was_decoded() -> None:
    policy = with_overrides(builtin(), {149: XidOverride(reason="r", preempt=False, severity="warning")})
    assert diagnose([Material("dmesg", LINK)])[0].preempt_job
    (diagnosis,) = diagnose([Material("dmesg", LINK)], policy)
    assert (diagnosis.preempt_job, diagnosis.severity) == (False, "warning")


def test_another_policy_is_followed_by_a_watch_that_runs() -> None:
    watch = Watch(builtin(), [WatchedNode(name="n1")])
    watched(watch, "nothing of interest")
    watch.follow(with_overrides(builtin(), {79: XidOverride(reason="r", preempt=False)}))
    assert decided(watched(watch, LOST)) == []
    watch.follow(builtin())
    assert decided(watched(watch, LOST.replace(":2a:", ":3a:"))) == ["gpu_lost"]


def test_replay_and_diagnose_take_the_homes_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = {"recording": 1, "name": "r", "start": "2026-11-01T00:00:00Z", "interval_s": 1.0}
    record = {"t": 1.0, "node": "n1", "kind": "log", "source": "kmsg", "line": LOST}
    file, log = tmp_path / "r.jsonl", tmp_path / "dmesg"
    file.write_text(
        "".join(json.dumps(v) + "\n" for v in ({**header, "nodes": [{"name": "n1"}], "jobs": []}, record))
    )
    log.write_text(LOST)
    monkeypatch.setenv("GRIDCTL_HOME", str(home(tmp_path, KEEP_79).config))
    played = CliRunner().invoke(root, ["replay", str(file), "-o", "json"])
    told = CliRunner().invoke(root, ["diagnose", str(log), "-o", "json"])
    assert '"xid.79+site"' in played.stdout
    assert '"decision"' not in played.stdout
    assert json.loads(told.stdout)[0]["why"]["rule"] == "xid.79+site"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '[xid.31]\nreason = "r"\npreempt = true\n',
            r"policy.toml, line 3: \[xid.31\]: .*never moves a job alone",
        ),
        ('[xid.45]\nreason = "r"\naction = "evacuate_and_reboot"\n', "line 3: .*never moves a job alone"),
        ('\n[xid.68]\nwhen = "now"\nreason = "r"\n', "line 3: .*never moves a job alone"),
        ('[xid.999]\nreason = "r"\npreempt = true\n', "line 3: .*no known meaning"),
        (
            '[xid.79]\nreason = "r"\naction = "evacuate_and_rebot"\n',
            "line 3: .*did you mean .*evacuate_and_reboot",
        ),
        ('[xid.79]\nreason = "r"\nseverity = "bad"\n', "line 3: .*known: critical, fatal, info, warning"),
        ('[xid.79]\nreason = "r"\nwhen = "window"\n', "line 3: .*set both, or neither"),
        ('[xid.79]\nreason = "r"\npreempt = "no"\n', r"line 3: \[xid.79\]: Expected `bool \| null`"),
        ('[xid.79]\nreason = "r"\nfault = "app"\n', r"line 3: \[xid.79\]: .*unknown field `fault`"),
        ("[xid.79]\npreempt = false\n", r"line 1: \[xid.79\]: .*missing required field `reason`"),
        ('[xid.79]\nreason = " "\npreempt = false\n', "line 2: .*whose experience"),
        ('[xid.79]\nreason = "r"\n', "line 1: .*nothing is overridden"),
        ('[xid.0]\nreason = "r"\npreempt = false\n', "line 1: .*from 1 to"),
        ('[xid.x9]\nreason = "r"\n', "line 1: .*not the number of an Xid"),
        ('[xid.079]\nreason = "r"\n', "line 1: .*not the number of an Xid"),
        ("[xid]\n79 = 3\n", r"line 2: \[xid.79\]: Expected `object`"),
        ("xid = 3\n", "line 1: xid is for tables"),
        (
            'xid.79.reason = "r"\nxid.79.when = "soon"\n',
            "line 2: 'soon' is no when|line 2: .*'soon' is no when",
        ),
        ('[xid.79]\nreason = "r\n', r"policy.toml: .*line 2"),
        ('[xid.79]\nreason = "r"\nreason = "s"\n', r"policy.toml: .*line 3"),
    ],
)
def test_a_wrong_override_is_named_with_file_and_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_policy(home(tmp_path, text))


def test_the_rest_of_the_file_counts_as_before(tmp_path: Path) -> None:
    assert load_policy(home(tmp_path, "watch_steps = 7\n" + KEEP_79)) == Policy(
        watch_steps=7, xid={79: XidOverride(reason="ticket 12", preempt=False)}
    )
    with pytest.raises(ConfigError, match="watch_step"):
        load_policy(home(tmp_path, "watch_step = 7\n" + KEEP_79))


overrides = st.builds(
    XidOverride,
    reason=st.just("r"),
    severity=st.none() | st.sampled_from(SEVERITIES),
    action=st.none() | st.sampled_from(actions()),
    preempt=st.none() | st.booleans(),
    when=st.none() | st.sampled_from(WHEN),
)


@given(said=st.dictionaries(st.sampled_from([*APPLICATIONS, 9999]), overrides, min_size=1))
def test_no_override_lets_an_application_move_a_job(said: dict[int, XidOverride]) -> None:
    policy = builtin()
    for xid, override in said.items():
        with contextlib.suppress(OverrideError):
            policy = with_overrides(policy, {**policy.overrides, xid: override})
    watch = Watch(policy, [WatchedNode(name="n1", gpus=8)])
    lines = [
        f"NVRM: Xid (PCI:0000:2a:00): {xid}, pid={pid}, name=python, some text"
        for xid in said
        for pid in (1, 2)
    ]
    outputs = watched(watch, *lines)
    assert decided(outputs) == []
    assert not [out for out in outputs if out.preempt_job]


@given(xid=st.integers(1, 200), override=overrides)
def test_what_is_accepted_is_said_and_nothing_else_changes(xid: int, override: XidOverride) -> None:
    try:
        policy = with_overrides(builtin(), {xid: override})
    except OverrideError:
        return
    row = policy.xids[xid]
    for name in ("severity", "action", "when"):
        assert getattr(override, name) in (None, getattr(row, name))
    assert override.preempt in (None, row.preempt != "no")
    assert (row.preempt != "no") == (row.when == "now")
    assert {k: v for k, v in policy.xids.items() if k != xid} == {
        k: v for k, v in builtin().xids.items() if k != xid
    }


def test_every_row_of_every_table_is_listed_with_its_source() -> None:
    rows = list(all_rows())
    assert len({row.rule for row in rows}) == len(rows)
    assert {row.table for row in rows} >= {"xid.tsv", "hardware.tsv", "cluster.tsv", "recovery.tsv"}
    assert all(row.source and row.severity in SEVERITIES for row in rows)


@pytest.mark.parametrize(
    ("xid", "rule"),
    [
        (79, "device.lost"),
        (79, "kernel.gpu_lost"),
        (13, "xid.13.same_unit"),
        (13, "application"),
        (154, "recovery.*"),
        (149, "xid.nvlink5.*"),
        (74, "xid.74.marginal"),
        (64, "device.remap_failed"),
        (9999, "unknown"),
    ],
)
def test_the_rules_that_look_at_a_number(xid: int, rule: str) -> None:
    assert rule in [use.rule for use in uses(builtin(), xid)]
    assert set(EVENT_NUMBERS.values()) <= builtin().xids.keys()


def invoke(tmp_path: Path, *words: str) -> str:
    run = CliRunner().invoke(root, ["policy", *words], env={"GRIDCTL_HOME": str(tmp_path), "COLUMNS": "200"})
    if run.exception and not isinstance(run.exception, SystemExit):
        raise run.exception
    return run.stdout


def test_policy_show_and_list(tmp_path: Path) -> None:
    home(tmp_path, KEEP_79)
    assert "preempt yes -> no, when now -> after_job" in invoke(tmp_path, "show", "79")
    shown = json.loads(invoke(tmp_path, "show", "xid.79", "-o", "json"))
    assert (shown["delivered"]["preempt"], shown["in_force"]["preempt"]) == ("yes", "no")
    assert shown["site"]["reason"] == "ticket 12"
    assert "Rules that look at it" in invoke(tmp_path, "show", "9999")
    kind = json.loads(invoke(tmp_path, "show", "gpu_lost", "-o", "json"))
    assert {"xid.79", "device.lost", "gpu_lost.repeat"} <= {row["rule"] for row in kind["rows"]}
    assert "policy.toml: ticket 12" in invoke(tmp_path, "list", "-o", "csv")
    with pytest.raises(Exception, match="did you mean gpu_lost"):
        invoke(tmp_path, "show", "gpu_lots")
