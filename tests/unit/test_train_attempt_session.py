"""A script that uses attempts where there is no agent: nothing is kept, and what is used wrongly is told."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gridagent.train import CONTEXT, Session, SessionError


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.delenv("GRIDAGENT_SOCKET", raising=False)
    dist.init_process_group("grid", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    made = Session(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), own={})
    try:
        yield made
    finally:
        made.close()
        dist.destroy_process_group()


def test_micro_counts_the_attempts_of_a_step(session: Session) -> None:
    seen = []
    for batch in session.batches(range(7)):
        with session.attempt():
            seen.append((batch, session.step, session.micro))
            if session.micro == 2:
                session.end_step()
    assert seen == [(0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 1, 0), (4, 1, 1), (5, 1, 2), (6, 2, 0)]
    assert session.attempts.off == "there is no agent here"
    assert CONTEXT.registry.tolerance is None


def test_an_error_of_the_script_passes(session: Session) -> None:
    with pytest.raises(ZeroDivisionError), session.attempt():
        _ = 1 // 0
    with session.attempt():
        session.end_step()


def test_end_step_belongs_into_the_attempt(session: Session) -> None:
    session.end_step()  # a script that makes no attempts
    with session.attempt():
        session.end_step()
    with pytest.raises(
        SessionError, match=r"outside of session\.attempt\(\): call it as the last line within"
    ):
        session.end_step()


def test_attempts_do_not_nest(session: Session) -> None:
    with session.attempt(), pytest.raises(SessionError, match="one for each batch"), session.attempt():
        pass


def test_only_who_stands_in_a_vote_can_apply(session: Session) -> None:
    with pytest.raises(SessionError, match="does not stand in a vote"):
        session.attempts.apply()
