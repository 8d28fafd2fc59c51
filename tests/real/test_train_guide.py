"""The script of docs/training-scripts.md, as it stands there: a rank moves, and nothing else changes."""

import re
from pathlib import Path

from fleet import Job, TrainingFleet, assert_same
from forkserver import JOBS

GUIDE = Path(__file__).parents[2] / "docs" / "training-scripts.md"
SEED = "torch.manual_seed(100 + rank)"
LOOP = "    for batch in session.batches(loader):"


def test_the_guides_script(trained: TrainingFleet, tmp_path: Path) -> None:
    (text,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    script = tmp_path / "train.py"
    # Two changes: the test paces the steps, and seeds what the script does not use and the digests hold.
    for line, changed in (
        (SEED, f"sys.path.append({str(JOBS)!r}); import record; record.seed(100 + rank)"),
        (LOOP, f"{LOOP}\n        record.before_step(session)"),
    ):
        text, found = re.subn(f"{re.escape(line)}.*", changed, text)
        assert found == 1
    script.write_text(text)
    run = trained.start(Job(script=str(script), steps=40))
    handover = trained.handover(run, [0])
    report = handover.swap()
    assert report.outcome == "commit", (report, run.logs())
    assert not handover.reports[0].blockers
    assert_same(run, run.finish(), trained.control(run.job))
