"""`python -m gridctl.control.compaction CONFIG STATE`: what the controller starts every hour."""

import logging
import os
import sys
from pathlib import Path

from gridctl.control.settings import load_policy
from gridctl.errors import GridctlError
from gridctl.history.compact import Place, compact
from gridctl.home import Home

if __name__ == "__main__":
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    os.nice(19)  # everything else goes first
    home = Home(Path(sys.argv[1]), Path(sys.argv[2]))
    try:
        kept = load_policy(home).history
        found = compact(Place.of(home, kept), kept)
    except GridctlError as error:
        sys.exit(f"gridctl: the history was not compacted: {error}")
    for text in (found.problem, *(f"{path} was damaged and is made anew" for path in found.damaged)):
        if text:
            logging.getLogger("gridctl.history").warning("%s", text)
