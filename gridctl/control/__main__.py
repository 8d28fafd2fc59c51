"""`python -m gridctl.control CONFIG STATE [--read-only]`: what `ensure` starts."""

import sys
from pathlib import Path

from gridagent.journal import JournalError
from gridctl.control import main
from gridctl.errors import GridctlError
from gridctl.home import Home

if __name__ == "__main__":
    config, state, *flags = sys.argv[1:]
    try:
        main(Home(Path(config), Path(state)), read_only="--read-only" in flags)
    except (GridctlError, JournalError, OSError) as error:
        sys.exit(f"gridctl controller: {error}")
