"""The hand-over in every interleaving, and proof that the exploration finds what is broken on purpose."""

import pytest
from transaction_model import Explorer, Found
from transaction_world import Model, Violation

from gridagent.train.transaction import Chair, Member
from gridagent.train.transaction_events import (
    ContinueNew,
    ContinueOld,
    Discard,
    Effect,
    GatherDone,
    MemberEvent,
    Phase,
    Tick,
)
from gridagent.train.transaction_messages import SOURCE, TARGET, Message, TooLate

OUTCOMES = {"abort", "commit", "returned", "dead"}


def explored(survivors: int, pairs: int, faults: int, lean: bool = True) -> Found:
    try:
        found = Explorer(Model(survivors, pairs, lean)).explore(faults)
    except Violation as violation:
        pytest.fail("\n".join([*violation.trace, f"VIOLATION: {violation}"]))
    print(f"{survivors} survivors, {pairs} moves, up to {faults} faults: {found.states} worlds explored")
    return found


def outcomes(found: Found) -> set[str]:
    return {outcome for outcome, _ in found.endings}


@pytest.mark.parametrize(("survivors", "pairs", "faults"), [(2, 1, 1), (1, 1, 2), (1, 2, 1)])
def test_no_interleaving_breaks_a_rule(survivors: int, pairs: int, faults: int) -> None:
    assert outcomes(explored(survivors, pairs, faults)) == OUTCOMES


def test_without_faults_a_handover_commits_aborts_or_returns() -> None:
    found = explored(2, 1, 0)
    assert outcomes(found) == OUTCOMES - {"dead"}  # aborts and returns come from deadlines that fire early
    assert ("commit", ("RUNNING",) * 5) in found.endings


def test_lean_exploration_ends_where_the_full_one_ends() -> None:
    lean, full = explored(1, 1, 1), explored(1, 1, 1, lean=False)
    assert lean.endings.keys() == full.endings.keys()
    assert lean.states < full.states


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("survivors", "pairs", "faults", "lean"),
    [(2, 1, 2, True), (2, 1, 3, True), (1, 2, 2, True), (2, 1, 1, False)],
)
def test_larger_explorations(survivors: int, pairs: int, faults: int, lean: bool) -> None:
    assert outcomes(explored(survivors, pairs, faults, lean)) == OUTCOMES


# --------------------------------------------------------------------------------------------------
# Broken machines


class CommitsBeforeAllStand(Chair):
    def _pause_began(self, now_s: float) -> None:
        super()._pause_began(now_s)
        self.phase = Phase.PREPARED


class TellsBeforeItIsDurable(Chair):
    def _write(self, kind: str) -> list[Effect]:
        effects = super()._write(kind)
        assert self._writing is not None
        return effects + self._recorded(self._writing, 0.0)


class CommitsWhateverWasRestored(Chair):
    def _compare(self) -> list[Effect]:
        moved = len(self.plan.owners(TARGET))
        return self._write("commit") if len(self._captured) == len(self._restored) == moved else []


class RunsBeforeAllGathered(Chair):
    def _end(self) -> list[Effect]:
        return self._write("run")


class AnswersNoObjection(Chair):
    def _heard(self, party: str, msg: Message, now_s: float) -> list[Effect]:
        return [] if isinstance(msg, TooLate) else super()._heard(party, msg, now_s)

    def deadline(self) -> float | None:
        return None


class TrustsItsOwnRecord(Chair):
    """Says commit although the ending is a return."""

    def _end(self) -> list[Effect]:
        effects = super()._end()
        if self._writing is not None and self._writing.kind == "return":
            return self._recorded(self._writing, 0.0)
        return effects


class GoesOnAloneAfterAtBoundary(Member):
    def _late(self) -> list[Effect]:
        return self._leave("tired") if self.phase == Phase.PREPARED else super()._late()


class GoesOnAloneWhenTheChannelBreaks(Member):
    def _lose_chair(self) -> list[Effect]:
        return self._leave("alone") if self.phase == Phase.PREPARED else super()._lose_chair()


class ForgetsThatItLeft(Member):
    def _late(self) -> list[Effect]:
        if self.phase != Phase.STANDING:
            return super()._late()
        self._due_s = None
        return [ContinueOld(self.boundary)]


class TakesItsRankBack(Member):
    def _late(self) -> list[Effect]:
        frozen = self.me.role == SOURCE and self.phase == Phase.COMMITTED
        return [ContinueOld(self.boundary)] if frozen else super()._late()


class WaitsForEver(Member):
    def deadline(self) -> float | None:
        return None if self._bound() else super().deadline()


class ArmsTooLate(Member):
    def _arm(self, boundary: int, begun: int, now_s: float) -> list[Effect]:
        return super()._arm(boundary, -1, now_s)


class TrainsOnceItHasGathered(Member):
    def on(self, event: MemberEvent, now_s: float) -> list[Effect]:
        effects = super().on(event, now_s)
        return [*effects, ContinueNew(1)] if isinstance(event, GatherDone) and effects else effects


class KeepsWhatItRestored(Member):
    def _go_on(self, phase: Phase, why: str) -> list[Effect]:
        return [e for e in super()._go_on(phase, why) if not isinstance(e, Discard)]


class HearsThingsAfterItsEnd(Member):
    def on(self, event: MemberEvent, now_s: float) -> list[Effect]:
        over = self.phase == Phase.ABORTED and not isinstance(event, Tick)
        return [ContinueOld(self.boundary)] if over else super().on(event, now_s)


BROKEN: list[tuple[type[Chair] | type[Member], str]] = [
    (CommitsBeforeAllStand, "may train in e.0, the records say epoch (1|-1)"),
    (TellsBeforeItIsDurable, "before its record was durable"),
    (CommitsWhateverWasRestored, "target:2: ContinueNew.* at the wrong time"),
    (RunsBeforeAllGathered, "dies without a kill|stuck"),
    (AnswersNoObjection, "stuck|dies without"),
    (TrustsItsOwnRecord, "return was sent before its record was durable"),
    (GoesOnAloneAfterAtBoundary, "may train in e.0, the records say epoch"),
    (GoesOnAloneWhenTheChannelBreaks, "may train in e.0, the records say epoch"),
    (ForgetsThatItLeft, "may train in e.0, the records say epoch|at the wrong time"),
    (TakesItsRankBack, "may train in e.0, the records say epoch"),
    (WaitsForEver, "stuck in PREPARED|stuck in COMMITTED|stuck in READY"),
    (ArmsTooLate, "StopAt.* at the wrong time"),
    (TrainsOnceItHasGathered, "may train in e.1, the records say epoch"),
    (KeepsWhatItRestored, "keeps what it restored"),
    (HearsThingsAfterItsEnd, "ABORTED is final|at the wrong time"),
]


@pytest.mark.parametrize(("broken", "found"), BROKEN, ids=[broken.__name__ for broken, _ in BROKEN])
def test_a_broken_machine_is_found(broken: type, found: str) -> None:
    chair = broken if issubclass(broken, Chair) else Chair
    member = broken if issubclass(broken, Member) else Member
    with pytest.raises(Violation, match=found) as caught:
        Explorer(Model(2, 1, chair=chair, member=member)).explore(1)
    print("\n".join([*caught.value.trace, str(caught.value)]))
