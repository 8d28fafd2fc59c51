"""What is to be done again and again, and does not end because it failed once."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from gridctl.errors import GridctlError

log = logging.getLogger("gridctl.control")


async def turn_for_ever(parts: Sequence[tuple[str, Callable[[], Awaitable[None]]]], pause_s: float) -> None:
    """Every part in its turn, then a pause. A part that fails is logged once until it works again or fails
    in another way; the others have their turn all the same.
    """
    said: dict[str, str] = {}
    while True:
        for name, part in parts:
            before = said.pop(name, "")
            try:
                await part()
            except Exception as error:
                said[name] = repr(error)
                if said[name] != before:
                    unexpected = not isinstance(error, GridctlError)
                    log.warning("%s failed and is tried again: %s", name, error, exc_info=unexpected)
        await asyncio.sleep(pause_s)
