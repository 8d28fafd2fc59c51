"""Numbers as drivers give them, where many a number means "unknown".

Unknown is neither zero nor healthy. Sources: the strings that nvidia-smi prints for a value that it
cannot read, and DCGM's blank values (its header `dcgm_structs.h`): a base with up to 15 reasons above it.
"""

import math
import re

_INT32_BLANK = 0x7FFFFFF0
_INT64_BLANK = 0x7FFFFFFFFFFFFFF0
_INT64_BLANK_AS_FP64 = float(1 << 63)  #: all of them, once a reader has made them floating-point numbers
_FP64_BLANK = float(1 << 47)
_REASONS = 16
_WHOLE = re.compile(r"[+-]?[0-9]{1,40}")


def number(value: object) -> float | None:
    """The value as a number; None for null, NaN, text such as "[N/A]" or "ERR!", and blank sentinels."""
    if type(value) in (float, int) and -_INT32_BLANK < value < _INT32_BLANK:  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, str):
        text = value.strip()[:40]
        try:
            value = int(text) if _WHOLE.fullmatch(text) else float(text)
        except ValueError:
            return None
    if not isinstance(value, int | float):
        return None
    for base in (_INT32_BLANK, _INT64_BLANK, _FP64_BLANK):
        if base <= value < base + _REASONS:
            return None
    if value == _INT64_BLANK_AS_FP64:
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) else None
