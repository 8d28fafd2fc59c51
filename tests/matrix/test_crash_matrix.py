"""The whole crash matrix with real processes. Once every cell was run docs/crash-matrix.md is written."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash import AGENTS, POINTS, PREPARING, Cell, Point
from crash_fleet import CrashFleet

TABLE = Path(__file__).parents[2] / "docs" / "crash-matrix.md"
EVERYWHERE = ("source", "target", *AGENTS, "controller")
BACK = "controller, rolled back"
COLUMNS = (*EVERYWHERE, BACK, "chair", "survivor")
#: A sample of what is no party of the move itself.
ALSO = {
    ("COMMITTED-chair", BACK),
    ("PREPARED-source1", "chair"), ("COMMITTED-chair", "chair"), ("RUNNING-chair", "chair"),
    ("GO-chair", "survivor"), ("PREPARED-target1", "survivor"), ("COMMITTED-target1", "survivor"),
}  # fmt: skip
CELLS = [
    (point, victim)
    for point in POINTS
    for victim in COLUMNS
    if victim in EVERYWHERE or (point.id, victim) in ALSO or (victim == BACK and point.stage == PREPARING)
]
RESULTS: dict[tuple[str, str], str] = {}

HEAD = """# Crash matrix

Written by `tests/matrix/test_crash_matrix.py` ({when}, {cells} cells, {failed} failed).
`make matrix` runs it.

One cell is one real swap under a real controller: three ranks on three nodes (DDP), rank 1 moves to a spare
on a fourth node, rank 0 has the chair. The swap is held at the point of the row, the party of the column is
killed with `kill -9`, and the swap goes on. A killed agent is started again on its home, as systemd does it.
A killed controller's run is taken up by its successor: `run resume`, or `run rollback`, which is refused in
the cut; then `run resume` ends the run.

Every cell asserts:

* one owner for every rank: the chair's records, the processes and all agents say the same;
* no step lost or done twice; losses of all ranks and digests of the final state bit-identical to those of the
  undisturbed run;
* the run comes to an end, the controller's journal verifies, every node can be used again;
* the survivors have exactly the sockets that they had before; every process ends by itself.

How it ended:

* **new**: the target has the rank, epoch 1. **old**: the source has it, epoch 0. **returned**: the source has
  it again, epoch 2.
* **recovered**: the killed process held a rank whose state was not elsewhere yet (a source that had not
  captured it all, a survivor), or had just been given it (a target whose epoch was decided to run). The
  others stand in the step that the death has spoilt; a second plan for the node brings a fresh spare in, from
  the parameters and the optimizer of a replica and the small state that the dead rank had sent to another one
  in its last vote. Asserted as for the others: no step lost or done twice, bit-identical to the end.
* **requeued**: the killed process was the chair, which alone may decide, or a survivor after the commit.
  Asserted then: every process ends by itself, the ranks' with a status other than 0, so that
  the scheduler requeues the job; the losses until then are those of the undisturbed run; the run ends.
* The seconds run from the kill to the end of the controller's run; they contain the restart of what was
  killed and the watch.

"""


@pytest.fixture(scope="module")
def fleet() -> Iterator[CrashFleet]:
    made = CrashFleet()
    try:
        yield made
    finally:
        made.close()
        if len(RESULTS) == len(CELLS):
            TABLE.write_text(table(), encoding="utf-8")


@pytest.mark.matrix
@pytest.mark.parametrize(("point", "victim"), CELLS, ids=[f"{p.id}/{v}" for p, v in CELLS])
def test_cell(fleet: CrashFleet, point: Point, victim: str) -> None:
    RESULTS[point.id, victim] = "FAILED"
    cell = Cell(fleet, point, victim)
    cell.check()
    RESULTS[point.id, victim] = f"{cell.seen}, run {cell.run_state}, {cell.took_s:.0f} s"


def table() -> str:
    """The document, from `RESULTS`."""
    failed = sum(result == "FAILED" for result in RESULTS.values())
    head = HEAD.format(when=time.strftime("%Y-%m-%d"), cells=len(RESULTS), failed=failed)
    lines = [f"| held at | {' | '.join(COLUMNS)} |", "|---|" + "---|" * len(COLUMNS)]
    for point in POINTS:
        cells = [RESULTS.get((point.id, victim), "") for victim in COLUMNS]
        lines.append(f"| **{point.phase}**: {point.says} | {' | '.join(cells)} |")
    return head + "\n".join(lines) + "\n"
