"""Is the journal whole, and was it ever longer? The chain and the signed checkpoints of it together."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from gridagent.journal import Verification, read, verify
from gridctl.trust import checkpoints
from gridctl.trust.checkpoints import Checkpoint

_SIGNED = ("seq", "hash", "t_unix_s", "fleet", "key", "public", "signature")


class Audited(msgspec.Struct, frozen=True, kw_only=True):
    """What was found. `first_bad` is the number of the first record that is not what it was."""

    ok: bool
    path: str
    records: int  #: sound ones, from the first on
    first_bad: int | None
    what: str
    segment: str
    offset: int
    head: str
    checkpoints: int  #: whose signature holds
    covered_seq: int  #: up to this record a checkpoint vouches for what is there
    keys: list[str]  #: ids of the keys that signed
    notes: list[str]  #: what is no damage, and worth knowing


def audit(journal: Path, files: Iterable[Path], public: str = "") -> Audited:
    """Checks every byte. `public`: the only key whose checkpoints count; else each vouches for itself."""
    chain = verify(journal)
    found, bad = _checkpoints(journal, files)
    sound = [one for one in found if checkpoints.sound(one, public)]
    wrong = sorted(one.seq for one in found if one not in sound)
    notes = [*_notes(chain), *([f"{bad} lines are no checkpoints"] if bad else [])]
    if wrong:
        notes.append(
            f"{len(wrong)} checkpoints do not count: not signed, or by another key (record {wrong[0]})"
        )
    first, what = _contradiction(journal, chain, sound)
    if public and not sound:
        notes.append("no checkpoint is signed by the key that was given: a loss at the end would not show")
    elif not sound:
        notes.append("no checkpoint is known: a loss at the end would not show")
    return Audited(
        ok=first is None,
        path=str(journal),
        records=chain.records,
        first_bad=first,
        what=what,
        segment=chain.segment,
        offset=chain.offset,
        head=chain.head,
        checkpoints=len(sound),
        covered_seq=max((one.seq for one in sound if one.seq <= chain.records), default=0),
        keys=sorted({one.key for one in sound}),
        notes=notes,
    )


def _checkpoints(journal: Path, files: Iterable[Path]) -> tuple[list[Checkpoint], int]:
    """Those of the files, and those that stand in the journal itself."""
    found: dict[str, Checkpoint] = {}
    bad = 0
    for path in files:
        some, wrong = checkpoints.read(path)
        bad += wrong
        found |= {one.signature: one for one in some}
    for record in read(journal, damaged=True):
        if record.kind == "audit" and record.data.get("what") == "checkpoint":
            try:
                one = msgspec.convert({name: record.data.get(name) for name in _SIGNED}, Checkpoint)
            except msgspec.ValidationError:
                bad += 1
                continue
            found[one.signature] = one
    return sorted(found.values(), key=lambda one: (one.seq, one.signature)), bad


def _contradiction(journal: Path, chain: Verification, sound: list[Checkpoint]) -> tuple[int | None, str]:
    """The first record that is not as it was, and what is wrong there."""
    wanted = {one.seq: one for one in sound}
    hashes = {
        r.seq: r.hash for r in read(journal, damaged=True) if r.seq in wanted and r.seq <= chain.records
    }
    for seq, one in sorted(wanted.items()):
        if seq <= chain.records and hashes.get(seq) != one.hash:
            return seq, f"record {seq} was replaced: a checkpoint of {_when(one)} has another hash of it"
    if not chain.ok:
        return chain.first_bad, chain.what
    last = max(wanted, default=0)
    if last > chain.records:
        what = f"records {chain.records + 1} to {last} are missing at the end"
        return chain.records + 1, f"{what}: a checkpoint of {_when(wanted[last])} had them"
    return None, ""


def _when(one: Checkpoint) -> str:
    return f"{one.t_unix_s:.0f} s (key {one.key[:8]})"


def _notes(chain: Verification) -> Iterable[str]:
    if chain.torn_bytes:
        yield f"{chain.torn_bytes} bytes of an unfinished line at the end: the next start repairs it"
    if chain.clock_back:
        yield f"the clock went back at record {chain.clock_back_first} ({chain.clock_back} times in all)"
    if chain.clock_leaps:
        yield f"nothing was written for a month before record {chain.clock_leaps_first}, or the clock was set"
    for name in chain.foreign:
        yield f"{name!a} lies in the folder and is no part of a journal"
