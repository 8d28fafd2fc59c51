"""What a test's training script writes, and how the test paces it.

argv of every script: FOLDER STEPS [more]. The owner of a rank appends "STEP LOSS_HEX" to FOLDER/rank-R.txt
and at the end writes the digests of its state to FOLDER/digests-R.json. A rank does not begin a step at
or above the number in FOLDER/limit while that file exists; while FOLDER/pace exists every step takes so
many seconds more.
"""

import json
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch

from gridagent.train import Session

FOLDER = Path(sys.argv[1])
STEPS = int(sys.argv[2])
MORE = sys.argv[3:]


def seed(number: int) -> None:
    """Seeds everything of the process that draws at random."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def before_step(session: Session) -> None:
    """Waits as the test wants it; a spare that warms up does not."""
    if not session.is_owner:
        return
    time.sleep(_number("pace", 0.0))
    while session.step >= _number("limit", STEPS + 1):
        time.sleep(0.005)


def wrote(session: Session, loss: torch.Tensor) -> None:
    """Notes the loss of the step that ends now. Call it before `end_step`."""
    if session.is_owner:
        with (FOLDER / f"rank-{session.rank}.txt").open("a") as file:
            print(session.step, float.hex(float(loss.detach())), file=file)


def done(session: Session) -> None:
    """Notes the final state and ends the session."""
    final = session.close()
    if session.is_owner:
        (FOLDER / f"digests-{session.rank}.json").write_text(json.dumps(final))


def _number(name: str, default: float) -> float:
    try:
        return float((FOLDER / name).read_text() or default)
    except (FileNotFoundError, ValueError):
        return default
