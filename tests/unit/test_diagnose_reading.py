"""What all layers read with: lines, JSON of any shape, fields by meaning; and the table of their rules."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gridctl.detect.diagnose
from gridctl.detect.diagnose import diagnose
from gridctl.detect.diagnose.documents import documents, looks_like_json
from gridctl.detect.diagnose.reading import (
    Row,
    bare,
    field,
    hosts_in,
    log_lines,
    ranks_in,
    rows_of,
    words_of,
)
from gridctl.detect.diagnose.ruling import clean, limits, rule_says, rules
from gridctl.detect.diagnose.texts import lines_of, mentions
from gridctl.model.diagnosis import Material

RECORDS = [{"t": 1, "a": 5}, {"t": 2, "a": 6}]
LINES = "\n".join(json.dumps(record) for record in RECORDS)


@pytest.mark.parametrize(
    "text",
    [
        LINES,
        "\ufeff" + LINES,
        LINES.replace("\n", "\r\n\r\n"),
        f"# a comment\nstarted\n{LINES}\nended",
        json.dumps(RECORDS),
        json.dumps(RECORDS, indent=4),
        "\n".join(json.dumps(record, indent=2) for record in RECORDS),
        json.dumps({"meta": {"x": 1}, "samples": RECORDS}),
        json.dumps({"result": {"y": 2}, "data": [RECORDS, []], "samples": RECORDS}),
        f'{{"broken": \n{LINES}\n{{"cut": "of',
        "t,a\n1,5\n2,6\n",
        'a,"t"\n5,1\n6,2\n',
    ],
)
def test_records_of_any_shape(text: str) -> None:
    found = [
        (row.number("t"), row.number("a")) for row in rows_of(Material("m", text)) if row.get("a") is not None
    ]
    assert found == [(1.0, 5.0), (2.0, 6.0)]


def test_what_is_no_json_gives_no_documents() -> None:
    for text in (
        "",
        "plain",
        "[E714 09:14:33 x] y",
        "{" * 9999,
        "[" * 9999,
        '{"a": ' * 5000,
        '{"a": 1',
        "[1, 2",
    ):
        assert list(documents(Material("m", text))) == []
    assert not looks_like_json(Material("m", "[rank3]:[E714 x"))
    assert list(documents(Material("m", '{"a": NaN}'))) != []


def test_fields_by_meaning() -> None:
    row = Row({"Node-Name": "n1", "labels": {"jobId": 7}, "metric": "link_downed", "value": "4", "x": None})
    assert (row.text("host"), row.text("job"), row.number("linkDowned")) == ("n1", "7", 4.0)
    assert (row.text("rank"), row.number("x"), row.number("host")) == ("", None, None)
    assert field({"A_b": {"set": True, "infinite": False, "number": 3}}, "ab") == 3
    assert field({"A_b": {"set": False, "infinite": False, "number": 3}}, "ab") is None
    assert words_of("rngDigest_saved-2") == ("rng", "digest", "saved", "2")


@pytest.mark.parametrize(
    ("record", "t_s"),
    [
        ({"t": 5}, 5.0),
        ({"timestamp": "2026-02-22T16:24:18Z"}, 1771777458.0),
        ({"@timestamp": "2026-02-22 16:24:18.500+00:00"}, 1771777458.5),
        ({"ts": 1771777458000}, 1771777458.0),
        ({"time": 1771777458000000}, 1771777458.0),
        ({"ts": "1771777458000000000"}, 1771777458.0),
        ({"day": 2}, 172800.0),
        ({"h": 1.5}, 5400.0),
        ({"t": "yesterday"}, None),
        ({"t": float("nan")}, None),
        ({}, None),
    ],
)
def test_times(record: dict[str, object], t_s: float | None) -> None:
    assert Row(record).time_s() == t_s


def test_wrappers_come_off_and_only_from_the_front() -> None:
    assert bare("12: [rank3]: message") == "message"
    assert bare("[default3]:[rank3]:[E1 x]") == "[E1 x]"
    assert bare("2026-02-22T16:24:18.123456789Z stdout F  3: message") == "message"
    assert bare("[2026-02-22T16:24:18.101] error: x") == "error: x"
    assert bare("Feb 22 16:24:18 h slurmctld[7]: error: x") == "error: x"
    assert bare("message: 12: [rank3]: x") == "message: 12: [rank3]: x"


def test_lines_are_cut_and_none_is_lost() -> None:
    assert list(lines_of("\ufeffa\r\n\nb")) == ["a", "", "b"]
    assert [len(line) for line in lines_of("x" * 50_000 + "\ny")] == [8192, 1]
    mixed = Material("m", '{"line": "one NCCL x"}\ntwo NCCL\nthree\n')
    assert list(log_lines(mixed, "NCCL ", "NCCL")) == ["one NCCL x", "two NCCL"]
    assert mentions("The Step counter", "step iter")
    assert mentions('{"STEP": 1}', "step")
    assert not mentions("nothing here", "step iter")


def test_lists_of_ranks_and_hosts_stay_small() -> None:
    assert ranks_in("0-3, {7}, [9]") == {0, 1, 2, 3, 7, 9}
    assert ranks_in([1, "4-5", None, True, -3]) == {1, 4, 5}
    assert len(ranks_in("0-9999999")) <= 4097
    assert len(ranks_in([f"{n}-{n + 4096}" for n in range(0, 10**6, 5000)])) <= 4096
    assert hosts_in("c[003,020-022],d1,e[1-2].x") == ["c003", "c020", "c021", "c022", "d1", "e1.x", "e2.x"]
    assert len(hosts_in("c[0-99999999]")) <= 4097
    assert hosts_in("c[9-1]") == []


def test_evidence_is_one_clean_short_line() -> None:
    assert clean("a\x1b[31mb\nc\u202ed") == "a [31mb c d"
    assert len(clean("x" * 9999)) == 240
    said = rule_says("nic.flap", [f"{n}" for n in range(99)], events=({"n": n} for n in range(9999)))
    assert len(said.why.evidence) == 7
    assert len(said.events) == 4096


def test_every_rule_is_used_and_has_a_source_and_moves_a_job_only_now() -> None:
    folder = Path(gridctl.detect.diagnose.__file__).parent
    code = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))
    groups = "|".join(sorted({name.partition(".")[0] for name in rules()}))
    assert set(re.findall(rf'"((?:{groups})\.[a-z-]+)"', code)) >= set(rules())
    for row in rules().values():
        assert row.source
        assert row.meaning
        assert row.preempt in ("yes", "no")
        assert row.preempt == "no" or (row.when == "now" and row.severity in ("critical", "fatal"))
        assert row.fault != "app" or row.preempt == "no"
    assert limits().nic["flap_sticky_s"] > 0


def test_what_no_layer_understands_is_said() -> None:
    found = diagnose([Material("a.txt", "hello"), Material("b.txt", "")])
    assert [(one.kind, one.action) for one in found] == [("missing_data", "manual_review")]


def test_findings_of_all_layers_stand_in_the_order_of_severity() -> None:
    nccl = "h1:1:2 [0] x.cc:1 NCCL WARN NET/IB : mlx5_0:1 Got async event : port error"
    slurm = "n1|idle\nn2|drain\n"
    ports = '{"t": 1, "hca": "x", "link_downed": 1}\n{"t": 2, "hca": "x", "link_downed": 2}'
    found = diagnose([Material(str(n), text) for n, text in enumerate((slurm, ports, nccl))])
    assert [one.severity for one in found] == ["critical", "warning", "info"]


@given(st.text(max_size=300))
def test_reading_never_raises(text: str) -> None:
    material = Material("m", text)
    for row in rows_of(material):
        row.time_s()
    list(documents(material))
    for line in lines_of(text):
        bare(line)
    ranks_in(text)
    hosts_in(text)
