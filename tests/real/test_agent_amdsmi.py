"""Source `amdsmi`: the real amdsmi in a real child process; only the driver's library is a stub."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from amdsmi_stub import AmdStub, compiled, library, stub
from gpu_heard import BRISK, CALM, Heard, listen

from gridagent.home import Home
from gridagent.telemetry import open_source
from gridagent.telemetry.amdsmi import AmdSmi
from gridagent.telemetry.amdsmi_gpu import FAST, SLOW
from gridagent.telemetry.gpus import Timing
from gridagent.telemetry.nvml_gpu import FAST as NVML_FAST
from gridagent.telemetry.nvml_gpu import SLOW as NVML_SLOW

__all__ = ["library", "stub"]  # fixtures

FAST_NAMES = {name for group in FAST for name in group}
SLOW_NAMES = {name for group in SLOW for name in group}
#: What the stub answers where no file says otherwise (uncorrectable: 2 in memory, 1 on the chip).
STUB_VALUES = """
    temp_c=61 temp_margin_c=39 mem_temp_c=52 power_w=412 power_limit_w=750 sm_clock_mhz=2100
    mem_clock_mhz=1300 util_pct=97 mem_used_mib=3072 mem_total_mib=196592 ecc_sbe_total=5
    ecc_dbe_total=3 retired_pages=3 pcie_gen=4 pcie_gen_max=5 pcie_width=16
    pcie_width_max=16 pcie_replay_total=6 processes=2
"""
EXPECTED = {name: float(value) for name, value in (pair.split("=") for pair in STUB_VALUES.split())}
VENDOR = b"\x02\x10\xa1\x74"
ALL_ONES = b"\xff\xff\xff\xff"
#: As the slow pace, but soon again.
PACED = Timing(interval_s=0.02, slow_s=0.05, read_s=60, start_s=60)


def listening(
    stub: AmdStub, test: Callable[[Heard], Awaitable[None]], *, timing: Timing = CALM, expected: int = 0
) -> None:
    listen(lambda: AmdSmi(root=str(stub.node), expected=expected, timing=timing), test)


def test_everything_is_read_under_the_names_that_nvml_has(stub: AmdStub) -> None:
    stub.set("count", 2)
    stub.set("1/temp", 88)
    stub.bus(0, VENDOR)
    stub.bus(1, VENDOR)

    async def test(heard: Heard) -> None:
        assert await heard.says("GPUs are read") == "amdsmi: 2 GPUs are read"
        first = await heard.sample()
        assert first["v"] == {**EXPECTED, "lost": 0}
        del first["v"]
        uuid = "00ff74a1-0000-1000-8000-000000000000"
        about = {"device": "gpu:0", "pci": "0000:c1:00.0", "uuid": uuid, "serial": "PCB00000"}
        assert first == {**about, "model": "Stub 0"}
        assert (await heard.sample("gpu:1", temp_c=88, temp_margin_c=12))["pci"] == "0000:d1:00.0"
        stub.set("0/temp", 99)
        again = await heard.sample(temp_c=99)
        assert set(again["v"]) == FAST_NAMES | {"lost"}

    listening(stub, test)
    assert set(EXPECTED) == FAST_NAMES | SLOW_NAMES
    assert (FAST_NAMES | SLOW_NAMES).issubset({name for group in (*NVML_FAST, *NVML_SLOW) for name in group})


def test_what_firmware_counts_is_read_at_its_own_pace_also_by_a_new_child(stub: AmdStub) -> None:
    async def test(heard: Heard) -> None:
        for _ in range(20):
            await heard.sample()
        stub.set("0/temp", "crash")
        await heard.says("has ended")
        stub.clear("0/temp")
        await heard.says("answers again")
        for _ in range(20):
            await heard.sample()
        assert stub.lines("calls") == ["0 umc"]

    listening(stub, test)


@pytest.mark.parametrize("code", [1, 2, 3, 10, 31, 40, 52])
def test_what_is_not_supported_is_null_and_no_error(stub: AmdStub, code: int) -> None:
    for name in ("temp", "util", "power_limit", "ecc_enabled", "bad_pages", "width", "processes"):
        stub.set(f"0/{name}", f"!{code}")
    null = ["temp_c", "util_pct", "power_limit_w", "ecc_dbe_total", "retired_pages", "pcie_gen", "processes"]

    async def test(heard: Heard) -> None:
        v = (await heard.sample())["v"]
        assert {name: v[name] for name in null} == dict.fromkeys(null)
        assert (v["power_w"], v["lost"]) == (412, None)  # no /sys: nobody can say
        await heard.sample()
        assert [reading for reading in heard.all if reading.kind == "log"] == []

    listening(stub, test)


def test_how_the_library_says_none_is_null_and_never_zero(stub: AmdStub) -> None:
    """Each as some release of the library or some series of GPUs does."""
    for name in ("util", "power_current", "gfx_clock"):
        stub.set(f"0/{name}", 0xFFFF)
    for name in ("mem_clock", "temp", "power_average"):
        stub.set(f"0/{name}", 0xFFFFFFFF)
    for name in ("critical", "power_limit", "ecc_enabled", "width", "speed"):
        stub.set(f"0/{name}", 0)
    stub.set("0/replays", -1)
    stub.set("0/driver_replays", "!2")
    null = """
        util_pct power_w sm_clock_mhz mem_clock_mhz temp_c temp_margin_c power_limit_w
        ecc_sbe_total ecc_dbe_total pcie_width pcie_gen pcie_replay_total
    """.split()

    async def test(heard: Heard) -> None:
        v = (await heard.sample())["v"]
        assert {name: v[name] for name in null} == dict.fromkeys(null)
        assert (v["mem_temp_c"], v["pcie_width_max"], v["pcie_gen_max"]) == (52, 16, 5)

    listening(stub, test)


def test_other_series_and_releases_say_it_elsewhere(stub: AmdStub) -> None:
    stub.set("0/power_current", 0xFFFF)
    stub.set("0/power_average", 300)
    stub.set("0/power_limit", 560)
    stub.set("0/replays", -1)

    async def test(heard: Heard) -> None:
        await heard.sample(power_w=300, power_limit_w=560, pcie_replay_total=8)

    listening(stub, test)


def test_a_part_that_is_silent_once_makes_no_sum_that_falls_and_rises(stub: AmdStub) -> None:
    async def test(heard: Heard) -> None:
        await heard.sample(ecc_dbe_total=3)
        stub.set("0/umc_ue", "!2")  # so the library calls a file that it could not read
        await heard.sample(ecc_dbe_total=None, ecc_sbe_total=None)
        stub.set("0/umc_ue", 7)
        await heard.sample(ecc_dbe_total=8)
        told = [r.v["v"]["ecc_dbe_total"] for r in heard.all if "ecc_dbe_total" in r.v.get("v", {})]
        assert {value for value in told if value is not None} == {3, 8}

    listening(stub, test, timing=PACED)


def test_an_error_is_null_and_told_once(stub: AmdStub) -> None:
    stub.set("0/power_current", "!12")

    async def test(heard: Heard) -> None:
        line = await heard.says("power_w")
        assert line == "gpu:0 (0000:c1:00.0): power_w: AMDSMI_STATUS_IO - I/O Error"
        await heard.sample(power_w=None, temp_c=61)
        stub.clear("0/power_current")
        await heard.says("no errors any more")
        assert [reading.v["line"] for reading in heard.all if reading.kind == "log"].count(line) == 1
        assert {reading.v["source"] for reading in heard.all if reading.kind == "log"} == {"amdsmi"}

    listening(stub, test, timing=PACED)


@pytest.mark.parametrize("gone", [ALL_ONES, None])
def test_a_gpu_that_has_left_the_bus_is_lost_and_the_others_go_on(stub: AmdStub, gone: bytes | None) -> None:
    stub.set("count", 2)
    stub.bus(0, VENDOR)
    stub.bus(1, VENDOR)
    timing = Timing(interval_s=0.02, slow_s=3600, read_s=60, start_s=60, lost_s=0.1, relist_s=2)

    async def test(heard: Heard) -> None:
        await heard.sample("gpu:1", lost=0)
        stub.bus(1, gone)
        stub.set("1/temp", "hang")  # as a driver may: it is not even asked
        silent = await heard.sample("gpu:1", lost=None)
        assert set(silent["v"].values()) == {None}
        said = await heard.says("is lost")
        assert said == "gpu:1 (0000:d1:00.0) is lost: it does not answer on the PCI bus"
        assert (await heard.sample("gpu:1", lost=1))["v"]["temp_c"] is None
        await heard.sample("gpu:0", temp_c=61, lost=0)
        await heard.sample("gpu:1", lost=None)  # a new process looks for it
        await heard.sample("gpu:1", lost=1)
        assert [reading.v["line"] for reading in heard.all if reading.kind == "log"] == [said]
        stub.clear("1/temp")
        stub.bus(1, VENDOR)
        await heard.says("gpu:1 (0000:d1:00.0) answers again")
        await heard.sample("gpu:1", temp_c=61, lost=0)
        assert stub.lines("hanging") == []

    listening(stub, test, timing=timing)


def test_a_gpu_that_is_reset_is_silent_and_not_lost(stub: AmdStub) -> None:
    stub.bus(0, VENDOR)

    async def test(heard: Heard) -> None:
        await heard.sample(lost=0)
        stub.bus(0, ALL_ONES)
        for _ in range(20):
            await heard.sample(lost=None)
        stub.bus(0, VENDOR)
        await heard.sample(lost=0, temp_c=61)
        assert [reading for reading in heard.all if reading.kind == "log"] == []

    listening(stub, test)


def test_a_gpu_that_sleeps_is_neither_asked_nor_lost(stub: AmdStub) -> None:
    """Public reports tell of 1048560 errors counted at each look at a GPU that slept."""
    stub.bus(0, ALL_ONES)
    (stub.device(0) / "power").mkdir()
    status = stub.device(0) / "power/runtime_status"
    status.write_text("suspended\n")

    async def test(heard: Heard) -> None:
        for _ in range(10):
            asleep = await heard.sample(lost=0)
            assert {value for name, value in asleep["v"].items() if name != "lost"} == {None}
        assert stub.lines("calls") == []
        stub.bus(0, VENDOR)
        status.write_text("active\n")
        await heard.sample(lost=0, ecc_dbe_total=3)

    listening(stub, test, timing=PACED)


def test_a_call_that_hangs_is_left_behind_and_the_other_gpus_are_read(stub: AmdStub) -> None:
    stub.set("count", 2)

    async def test(heard: Heard) -> None:
        await heard.sample("gpu:1", temp_c=61)
        stub.set("0/temp", "hang")
        line = await heard.says("driver unresponsive")
        assert line == "driver unresponsive: gpu:0 (0000:c1:00.0) did not answer within 2 s"
        silent = (await heard.sample("gpu:0", lost=None))["v"]
        assert set(silent.values()) == {None}
        stub.set("1/temp", 55)
        await heard.sample("gpu:1", temp_c=55)
        stub.clear("0/temp")
        await heard.says("gpu:0 (0000:c1:00.0) answers again")

    listening(stub, test, timing=BRISK)


def test_fewer_gpus_than_the_node_has_are_told_and_one_that_is_listed_no_more_is_unknown(
    stub: AmdStub,
) -> None:
    stub.set("count", 2)

    async def test(heard: Heard) -> None:
        await heard.sample("gpu:1", temp_c=61)
        stub.set("count", 1)
        stub.set("0/temp", "crash")
        await heard.says("1 GPUs are listed by the driver, 2 expected")
        stub.clear("0/temp")
        await heard.says("gpu:1 (0000:d1:00.0) is no longer listed by the driver")
        silent = (await heard.sample("gpu:1"))["v"]
        assert set(silent.values()) == {None}

    listening(stub, test, timing=BRISK, expected=2)


def test_no_driver_is_told_once_and_waited_for(stub: AmdStub) -> None:
    stub.set("init", "!34")

    async def test(heard: Heard) -> None:
        said = await heard.says("AMD SMI")
        assert said == "amdsmi: AMD SMI cannot be used: AMDSMI_STATUS_DRIVER_NOT_LOADED - Driver not loaded"
        silent = asyncio.ensure_future(heard.says(""))
        while heard.source._pause.until_s < asyncio.get_running_loop().time() + 1:  # some failures later
            assert not silent.done()
            await asyncio.sleep(0.01)
        stub.clear("init")
        assert await silent == "amdsmi: 1 GPUs are read"

    listening(stub, test)


@pytest.mark.parametrize("library_is", ["absent", "damaged", "older"])
def test_without_a_library_that_fits_it_says_so(
    stub: AmdStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library_is: str
) -> None:
    if library_is == "damaged":
        (tmp_path / "libamd_smi.so").write_text("no library")
    elif library_is == "older":
        compiled(tmp_path, whole=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))

    async def test(heard: Heard) -> None:
        why = await heard.says("AMD SMI cannot be used: libamd_smi.so is missing, or of another release than")
        assert ("undefined symbol: amdsmi_" in why) is (library_is == "older")

    listening(stub, test)


def test_the_source_reads_below_the_nodes_root_and_takes_no_options(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.config_file.write_text('node = "n1"\nlisten = "10.0.0.7:7443"\ngpus = 8\n')
    source = open_source("amdsmi", home, "n1", "/host")
    assert isinstance(source, AmdSmi)
    assert "/host" in source._children._command
