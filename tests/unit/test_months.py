"""A month passed over a minute at a time says what it says record by record."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from gridctl.simulate.layout import fleet
from gridctl.simulate.plan import life

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "detect_months.py"


@pytest.fixture(scope="module")
def months() -> ModuleType:
    spec = importlib.util.spec_from_file_location("detect_months", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_is_passed_over_changes_no_word_of_the_watchdog(months: ModuleType, seed: int) -> None:
    hours, times = 4.0, 800.0
    told = [
        sorted(
            map(str, months.Month(life(fleet(16, str(seed), gpus=2), hours, times)).lines(hours, whole=whole))
        )
        for whole in (False, True)
    ]
    assert told[0] == told[1]
    assert any("'preempt_job': True" in line for line in told[0])
