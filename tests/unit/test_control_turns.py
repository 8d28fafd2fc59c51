"""The controller's loop: what fails in it ends nothing and hides nothing."""

import asyncio
import logging
from pathlib import Path

import pytest

from gridctl.control.controller import Controller
from gridctl.control.turns import turn_for_ever
from gridctl.errors import GridctlError, Refused
from gridctl.home import Home
from gridctl.trust.authority import Authority


def test_a_part_that_fails_is_tried_again_and_holds_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    turns: list[str] = []
    enough = asyncio.Event()

    async def failing() -> None:
        turns.append("failing")
        if len(turns) > 6:
            return
        raise ZeroDivisionError("one") if len(turns) < 5 else Refused("disk-full", "two")

    async def working() -> None:
        turns.append("working")
        if len(turns) == 10:
            enough.set()

    async def both() -> None:
        loop = asyncio.create_task(turn_for_ever((("the first", failing), ("the second", working)), 0.0))
        await asyncio.wait_for(enough.wait(), 60)
        loop.cancel()

    with caplog.at_level(logging.WARNING):
        asyncio.run(both())
    assert turns[:10] == ["failing", "working"] * 5
    assert [record.message for record in caplog.records] == [
        "the first failed and is tried again: one",
        "the first failed and is tried again: two",
    ], "once each"
    assert "ZeroDivisionError" in caplog.text, "with the place where it happened"


def test_a_controller_whose_loop_ends_says_so_and_ends(tmp_path: Path) -> None:
    home = Home.at(tmp_path)
    Authority.ephemeral(home.trust, "f")
    home.fleet_file.write_text('[fleet]\nname = "f"\n')

    async def ended() -> None:
        controller = Controller(home)
        await controller.start()
        assert controller._turning is not None
        controller._turning.cancel()
        try:
            await asyncio.wait_for(controller.until(asyncio.Event()), 60)
        finally:
            await controller.close()

    with pytest.raises(GridctlError, match="loop has ended, please report it"):
        asyncio.run(ended())
