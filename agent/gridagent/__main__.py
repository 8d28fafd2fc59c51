"""`python -m gridagent`: the same as the command `gridagent`."""

import sys

from gridagent.cli import main

sys.exit(main())
