"""Files that should hold a count and do not."""

from pathlib import Path
from typing import Any

import pytest

from gridagent.telemetry import Reading
from gridagent.telemetry.files import PROBES
from gridagent.telemetry.tree import Tree

PORT = "sys/class/infiniband/mlx5_0/ports/1"


def values(readings: list[Reading]) -> dict[str, dict[str, Any]]:
    return {reading.v["device"]: reading.v["v"] for reading in readings}


@pytest.mark.parametrize("text", ["-5", "1_000", "9" * 21, "0x10", "\u0663"])
def test_what_is_no_count_is_no_value(tmp_path: Path, text: str) -> None:
    """A part of a number, or less than nothing, would pass for a count that was reset."""
    memory = tmp_path / "sys/devices/system/edac/mc/mc0"
    files = {
        f"{PORT}/counters/link_downed": text,
        "sys/class/net/e0/device/vendor": "",
        "sys/class/net/e0/statistics/rx_errors": text,
        "sys/class/net/e0/carrier_changes": text,
        "sys/bus/pci/devices/0000:01:00.0/aer_dev_fatal": f"TOTAL_ERR_FATAL {text}",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    memory.mkdir(parents=True)
    (memory / "ue_count").write_text("0")
    counts = (memory / "ce_count").write_text
    counts("5")
    edac = PROBES["edac"](Tree(tmp_path, "edac"))
    edac.read()
    counts(text)
    assert values(edac.read())["node"] == {"edac_ce_total": 5, "edac_ue_total": 0}
    for name in ("infiniband", "ethernet", "aer"):
        for device, found in values(PROBES[name](Tree(tmp_path, name)).read()).items():
            assert set(found.values()) == {None}, (device, found)
