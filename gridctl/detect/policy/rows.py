"""The tables as one list, for who asks what a number or a kind means here, and which rules look at it."""

from collections.abc import Iterator

import msgspec

from gridctl.detect.meaning import EVENT_NUMBERS, NVLINK5
from gridctl.detect.policy import (
    DetectPolicy,
    LevelRow,
    PolicyRow,
    SourceRow,
    builtin,
    delivered,
    parse_table,
    xid_row,
)
from gridctl.detect.policy.hardware import Rule, hardware


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A row of any table. `rule` is how findings name it."""

    table: str
    rule: str
    kind: str
    severity: str
    action: str
    fault: str
    preempt: str  #: yes, no, or if-fatal: where the driver's line says so
    when: str
    meaning: str
    source: str
    xid: int | None = None


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that looks at an Xid, and what it does."""

    rule: str
    table: str  #: where it stands; "" for what no file can switch off
    says: str


def xid_entry(policy: DetectPolicy, xid: int) -> Entry:
    """The row of an Xid, or the one for numbers without a row."""
    row = xid_row(policy, xid)
    table = "policy.toml" if xid in policy.overrides else "xid.tsv" if xid in policy.xids else ""
    entry = _entry(table, f"xid.{xid}", row.kind, row.fault, row.meaning, row)
    return msgspec.structs.replace(entry, xid=xid)


def all_rows(policy: DetectPolicy | None = None) -> Iterator[Entry]:
    """Every row of every table, the numbers first."""
    policy = policy or builtin()
    yield from (xid_entry(policy, xid) for xid in sorted(policy.xids))
    for table in ("hardware.tsv", "cluster.tsv"):
        for rule in parse_table(delivered(table), Rule, table):
            yield Entry(table=table, **msgspec.structs.asdict(rule))
    for value, advice in policy.recovery.items():
        told = f"the driver asks for: {advice.name}"
        yield _entry("recovery.tsv", f"recovery.{value}", "recovery_action_pending", "node", told, advice)
    for metric, row in policy.devices.items():
        yield _entry("device.tsv", f"device.{metric}", row.kind, row.fault, row.meaning, row)
    for level in (level for levels in policy.levels.values() for level in levels):
        yield _entry("levels.tsv", f"level.{level.rule}", level.kind, level.fault, level.meaning, level)
    for own in policy.sources:
        yield _entry("sources.tsv", f"source.{own.rule}", own.kind, own.fault, own.meaning, own)


def _entry(
    table: str, rule: str, kind: str, fault: str, meaning: str, row: PolicyRow | LevelRow | SourceRow
) -> Entry:
    return Entry(
        table=table,
        rule=rule,
        kind=kind,
        severity=row.severity,
        action=row.action,
        fault=fault,
        preempt=row.preempt if isinstance(row, PolicyRow) else "no",
        when=row.when,
        meaning=meaning,
        source=row.source,
    )


def uses(policy: DetectPolicy, xid: int) -> list[Use]:
    """The rules that look at an Xid, from the nearest to the most general."""
    found = [Use(rule=f"xid.{xid}", table=xid_entry(policy, xid).table, says="a kernel line with the number")]
    for rule, number in EVENT_NUMBERS.items():
        if number == xid:
            found.append(Use(rule=rule, table="", says="the driver's words for it, told without the number"))
    found += _decoded(xid)
    kind = xid_row(policy, xid).kind
    prefix = "xid.nvlink5." if xid in NVLINK5 else f"xid.{xid}."
    for row in all_rows(policy):
        if row.rule.startswith(prefix):
            found.append(Use(rule=row.rule, table=row.table, says=row.meaning))
        elif row.kind == kind and row.xid is None and kind not in ("unknown_xid", "none"):
            found.append(Use(rule=row.rule, table=row.table, says=f"the same kind: {row.meaning}"))
    return found + list(_general(policy, xid))


def _decoded(xid: int) -> Iterator[Use]:
    if xid == 74:
        count = len(hardware().registers)
        says = f"the registers in the line decide: {count} bits are known"
        yield Use(rule="xid.74.*", table="nvlink_registers.tsv", says=says)
    elif xid in NVLINK5:
        count = sum(row.xid == xid for row in hardware().faults)
        says = f"the sub-code in the line decides: {count} rows are of this number"
        yield Use(rule="xid.nvlink5.*", table="nvlink_faults.tsv", says=says)
    elif xid == 154:
        says = "its text names the driver's advice, which sets the action of what came before it"
        yield Use(rule="recovery.*", table="recovery.tsv", says=says)


def _general(policy: DetectPolicy, xid: int) -> Iterator[Use]:
    chain = policy.thresholds.chain
    if xid != 45:
        yield Use(
            rule=f"xid.{xid}.caused_by",
            table="",
            says="an Xid 45 that names this number as its cause means it",
        )
    yield Use(
        rule="burst", table="thresholds.toml", says=f"repeats less than {chain.burst_gap_s:g} s apart are one"
    )
    says = f"after another Xid of the GPU within {chain.window_s:g} s, and no worse: that one is the cause"
    yield Use(rule="chain.*", table="thresholds.toml", says=says)
    if xid_row(policy, xid).fault == "app":
        yield Use(rule="application", table="", says="applications cause it: it never moves a job alone")
    elif xid not in policy.xids:
        yield Use(rule="unknown", table="", says="a number without a row is reported and moves nobody")
