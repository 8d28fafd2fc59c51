"""The long tests of `make matrix` use what tests/real is made of."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "real"))
