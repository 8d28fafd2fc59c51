"""Errors that the parts of an AMD GPU count, summed: against a slow twin, whatever is silent when."""

import enum
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gridagent.telemetry.amdsmi_gpu import GpuReader

PARTS = 3


class Block(enum.IntEnum):
    A, B, C = 1, 2, 4


class LibraryError(Exception):
    def get_error_code(self) -> int:
        return 2


class Library:
    """As much of amdsmi as counts errors. A part that is silent has no count."""

    AmdSmiGpuBlock = Block
    AmdSmiLibraryException = LibraryError
    counts: tuple[int | None, ...] = ()

    def amdsmi_get_gpu_ecc_enabled(self, handle: object) -> int:
        return sum(Block)

    def amdsmi_get_gpu_ecc_count(self, handle: object, block: Block) -> dict[str, int]:
        count = self.counts[list(Block).index(block)]
        if count is None:
            raise LibraryError
        return {"correctable_count": 10 * count, "uncorrectable_count": count}


def twin(history: list[tuple[int | None, ...]]) -> tuple[int | None, int | None]:
    """The sum at the end: of the parts that ever counted, if every one of them does now."""
    ever = [part for part in range(PARTS) if any(counts[part] is not None for counts in history)]
    now = [history[-1][part] for part in ever]
    known = [count for count in now if count is not None]
    return (10 * sum(known), sum(known)) if known and len(known) == len(now) else (None, None)


@given(st.lists(st.tuples(*[st.none() | st.integers(0, 9)] * PARTS), min_size=1, max_size=8))
def test_a_sum_is_of_all_parts_or_none(history: list[tuple[int | None, ...]]) -> None:
    library: Any = Library()
    gpu = GpuReader(library, 0, None, Path("/"), 30.0)
    for end, counts in enumerate(history, start=1):
        library.counts = counts
        assert gpu.counted_errors() == twin(history[:end])
