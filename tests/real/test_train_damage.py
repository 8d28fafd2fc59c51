"""Whatever is wrong with a transfer is found before the commit, is named, and training does not notice."""

import pytest
from fleet import Job, TrainingFleet, assert_same

from gridagent.train.transfer import CHUNK_BYTES

WIDE = Job("wide", steps=24)

#: damage -> job, what must be named in `found`
DAMAGE = {
    "bit=0": (WIDE, ("differs from the source's by hash",)),
    "bit=middle": (WIDE, ("differs from the source's by hash",)),
    "bit=last": (WIDE, ("differs from the source's by hash",)),
    "truncate=middle": (WIDE, ("cut off", "(optimizer)")),
    "manifest": (Job("ddp"), ("model/0.weight", "in the manifest")),
    "moment": (Job("ddp"), ("optimizer/0/exp_avg (optimizer)", "not in the manifest")),
    "buffer": (Job("ddp"), ("model/mask (buffers)", "not in the manifest")),
    "rng": (Job("ddp"), ("rng: digest",)),
    "nan": (Job("ddp"), ("model/0.weight (parameters)", "NaN")),
}
SHARDED = {
    "bit": (Job("fsdp"), ("differs from the source's by hash",)),
    "moment": (Job("fsdp"), ("optimizer/0/exp_avg (optimizer)", "not in the manifest")),
}


@pytest.mark.parametrize(
    ("damage", "job", "named"),
    [
        *((damage, *rest) for damage, rest in [*DAMAGE.items(), *SHARDED.items()]),
        ("", Job("stubborn"), ("the received state does not fit: AssertionError: not in this room",)),
    ],
    ids=[*DAMAGE, *(f"fsdp-{damage}" for damage in SHARDED), "the-script-refuses"],
)
def test_damage_is_found(trained: TrainingFleet, damage: str, job: Job, named: tuple[str, ...]) -> None:
    run = trained.start(job)
    handover = trained.handover(run, [1])
    handover.describe()
    chunks = -(-sum(handover.reports[1].state_bytes.values()) // CHUNK_BYTES)
    assert chunks >= 3 or job != WIDE
    numbers = {"middle": str(chunks // 2), "last": str(chunks - 1)}
    word, _, at = damage.partition("=")
    handover.damage = f"{word}={numbers.get(at, at)}" if at else word
    for act in (handover.specialise, handover.open, handover.join):
        act()
    report = handover.cut()
    handover.end()
    assert (report.outcome, report.epoch) == ("abort", 0), report
    assert any(all(part in line for part in named) for line in report.found), report.found
    assert report.reason
    assert_same(run, run.finish(), trained.control(run.job))
