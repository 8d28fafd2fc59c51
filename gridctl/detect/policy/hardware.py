"""The policy for what hardware, drivers and tools say: hardware.tsv, hardware.toml and the NVLink tables."""

import tomllib
from functools import cache

import msgspec

from gridctl.detect.policy import PolicyRow, delivered, parse_table


class Rule(PolicyRow, frozen=True, kw_only=True):
    """What one rule concludes. `meaning` says it in words."""

    rule: str
    kind: str
    meaning: str
    fault: str


class _RegisterRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    register: int  #: from 1 on
    bits: str
    class_: str = msgspec.field(name="class")
    source: str = ""


class _FaultRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    xid: int
    unit: str  #: its spellings, parted by "/"
    reasons: str  #: "" for any
    statuses: str  #: hexadecimal bits, "" for any
    bucket: str  #: reset, ignore or follow_154
    look: str
    source: str


class _SwitchRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sxid: int
    rule: str
    whatever_word: str  #: "yes": also where the line says Non-fatal


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    rules: dict[str, Rule]
    limits: dict[str, dict[str, float | list[str]]]
    registers: dict[tuple[int, int], str]  #: (register, bit) of Xid 74 -> class
    faults: tuple[_FaultRow, ...]
    switches: dict[int, _SwitchRow]

    def limit(self, section: str, name: str) -> float:
        """A number of hardware.toml."""
        value = self.limits[section][name]
        assert not isinstance(value, list), f"{section}.{name} is a list"
        return value

    def words(self, section: str, name: str) -> list[str]:
        """A list of hardware.toml."""
        value = self.limits[section][name]
        assert isinstance(value, list), f"{section}.{name} is a number"
        return value


@cache
def hardware() -> Hardware:
    """The policy that is delivered with gridctl."""
    tables = {
        name: delivered(name)
        for name in ("hardware.tsv", "nvlink_registers.tsv", "nvlink_faults.tsv", "sxid.tsv")
    }
    registers = {
        (row.register, int(bit)): row.class_
        for row in parse_table(tables["nvlink_registers.tsv"], _RegisterRow, "nvlink_registers.tsv")
        for bit in row.bits.split()
    }
    switches = parse_table(tables["sxid.tsv"], _SwitchRow, "sxid.tsv")
    return Hardware(
        rules={row.rule: row for row in parse_table(tables["hardware.tsv"], Rule, "hardware.tsv")},
        limits=msgspec.convert(
            tomllib.loads(delivered("hardware.toml")), dict[str, dict[str, float | list[str]]]
        ),
        registers=registers,
        faults=tuple(parse_table(tables["nvlink_faults.tsv"], _FaultRow, "nvlink_faults.tsv")),
        switches={row.sxid: row for row in switches},
    )
