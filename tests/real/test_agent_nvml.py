"""Source `nvml`: the real nvidia-ml-py in a real child process; only the driver's library is a stub."""

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from gpu_heard import BRISK, CALM, Heard, listen
from nvml_stub import Stub, compiled, library, stub

from gridagent.home import Home
from gridagent.signals.nvidia import KernelParser, Xid
from gridagent.telemetry import open_source
from gridagent.telemetry.gpus import HUNG_MAX, Timing
from gridagent.telemetry.nvml import Nvml
from gridagent.telemetry.nvml_gpu import FAST, LINKS, SLOW

__all__ = ["library", "stub"]  # fixtures

FAST_NAMES = {name for group in FAST for name in group}
#: What the stub answers where no file says otherwise (nvlink_crc: fields 38 and 45).
STUB_VALUES = """
    temp_c=41 temp_margin_c=33 mem_temp_c=82 power_w=123.456 power_limit_w=700 sm_clock_mhz=1980
    mem_clock_mhz=2619 throttle=1 util_pct=97 mem_used_mib=3072 mem_total_mib=81920 processes=2
    recovery_action=0 ecc_sbe_total=5 ecc_dbe_total=0 ecc_sram_ue_total=3 ecc_sram_threshold=0
    pcie_replay_total=6 pcie_gen=4 pcie_gen_max=5 pcie_width=16 pcie_width_max=16 mig_mode=0
    mig_mode_pending=1 lost=0 remap_corr_total=7 remap_uncorr_total=1 remap_pending=0
    remap_failed=0 retired_pages=3 nvlink_down=0 nvlink_crc_total=83 nvlink_replay_total=52
    nvlink_recovery_total=59
"""
EXPECTED = {name: float(value) for name, value in (pair.split("=") for pair in STUB_VALUES.split())}
SLOW_NAMES = {name for group in SLOW for name in group} | set(LINKS)


def listening(
    test: Callable[[Heard], Awaitable[None]],
    *,
    timing: Timing = CALM,
    events: bool = False,
    expected: int = 0,
) -> None:
    listen(lambda: Nvml(events=events, expected=expected, timing=timing), test)


def test_everything_is_read_under_the_formats_names(stub: Stub) -> None:
    stub.set("count", 2)
    stub.set("1/temp", 88)
    stub.set("1/field230", 2)

    async def test(heard: Heard) -> None:
        assert await heard.says("GPUs are read") == "nvml: 2 GPUs are read, driver 999.10"
        first = await heard.sample()
        assert first["v"] == EXPECTED
        assert set(first["v"]) == FAST_NAMES | SLOW_NAMES | {"lost"}
        del first["v"]
        uuid = "GPU-00000000-0000-4000-8000-000000000000"
        about = {"device": "gpu:0", "pci": "0000:1a:00.0", "uuid": uuid, "serial": "7700000000"}
        assert first == {**about, "model": "Stub 0"}
        second = await heard.sample("gpu:1", temp_c=88, recovery_action=2)
        assert second["pci"] == "0000:2a:00.0"
        stub.set("0/temp", 99)
        assert "serial" not in await heard.sample(temp_c=99)

    listening(test)


def test_what_firmware_keeps_is_read_at_its_own_pace_also_by_a_new_child(stub: Stub) -> None:
    stub.set("count", 2)
    once = sorted(
        [
            f"{gpu} {name}"
            for gpu in (0, 1)
            for name in ("field38", "field45", "field52", "field59", "remap_unc")
        ]
    )

    async def test(heard: Heard) -> None:
        for _ in range(20):
            await heard.sample("gpu:1")
        stub.set("1/temp", "crash")
        await heard.says("has ended")
        stub.clear("1/temp")
        await heard.says("answers again")
        for _ in range(20):
            await heard.sample("gpu:1")
        assert sorted({c for c in stub.lines("calls") if "retired" not in c}) == once
        assert len([c for c in stub.lines("calls") if "retired" not in c]) == len(once)

    listening(test, timing=CALM)


def test_the_slow_pace_is_a_pace(stub: Stub) -> None:
    async def test(heard: Heard) -> None:
        for _ in range(3):
            await heard.until(lambda reading: "remap_pending" in reading.v.get("v", {}))
        assert set((await heard.sample())["v"]) - {"lost"} in (
            FAST_NAMES,
            FAST_NAMES | SLOW_NAMES,
        )

    listening(test, timing=Timing(interval_s=0.02, slow_s=0.1))


@pytest.mark.parametrize("code", [2, 3, 4, 13, 27])
def test_what_is_not_supported_is_null_and_no_error(stub: Stub, code: int) -> None:
    for name in ("temp", "sbe", "remap_unc", "field230", "field38", "field45", "links", "mig", "throttle"):
        stub.set(f"0/{name}", f"!{code}")
    null = ["temp_c", "ecc_sbe_total", "remap_pending", "recovery_action", "nvlink_crc_total", "nvlink_down"]

    async def test(heard: Heard) -> None:
        v = (await heard.sample())["v"]
        assert {name: v[name] for name in [*null, "mig_mode"]} == dict.fromkeys([*null, "mig_mode"])
        assert (v["power_w"], v["lost"]) == (123.456, 0)
        await heard.sample()
        assert [reading for reading in heard.all if reading.kind == "log"] == []

    listening(test)


def test_what_the_driver_marks_as_no_value_is_none_in_every_unit(stub: Stub) -> None:
    stub.set("garbled", 1)
    for name in ("power_mw", "power_limit_mw"):
        stub.set(f"0/{name}", 0xFFFFFFFF)
    for name in ("mem_used", "sbe", "throttle"):
        stub.set(f"0/{name}", -1)

    async def test(heard: Heard) -> None:
        assert await heard.says("GPUs are read") == "nvml: 1 GPUs are read"
        v = (await heard.sample())["v"]
        none = {"power_w", "power_limit_w", "mem_used_mib", "ecc_sbe_total", "throttle"}
        assert {name for name, value in v.items() if value is None} == none
        assert v["mem_total_mib"] == 81920

    listening(test)


def test_an_unknown_error_is_null_and_told_once(stub: Stub) -> None:
    stub.set("0/power_mw", "!999")
    stub.set("0/temp", 0xFFFFFFFF)

    async def test(heard: Heard) -> None:
        line = await heard.says("power_w")
        assert line == "gpu:0 (0000:1a:00.0): power_w: Unknown Error"
        v = (await heard.sample())["v"]
        assert (v["power_w"], v["temp_c"], v["sm_clock_mhz"]) == (None, None, 1980)
        stub.clear("0/power_mw")
        await heard.says("no errors any more")
        assert [reading.v["line"] for reading in heard.all if reading.kind == "log"].count(line) == 1

    listening(test, timing=Timing(interval_s=0.02, slow_s=0.05))


def test_a_lost_gpu_is_a_fact_and_the_others_go_on(stub: Stub) -> None:
    stub.set("count", 3)

    async def test(heard: Heard) -> None:
        await heard.sample("gpu:2", lost=0)
        stub.set("1/all", "!15")
        assert await heard.says("is lost") == "gpu:1 (0000:2a:00.0) is lost: NVML says GPU is lost"
        lost = await heard.sample("gpu:1", lost=1, temp_c=None)
        assert lost["pci"] == "0000:2a:00.0"
        assert {value for name, value in lost["v"].items() if name != "lost"} == {None}
        await heard.sample("gpu:2", temp_c=41, lost=0)
        stub.clear("1/all")
        await heard.says("gpu:1 (0000:2a:00.0) answers again")
        await heard.sample("gpu:1", temp_c=41, lost=0)

    listening(test, timing=BRISK)


def test_a_gpu_that_is_lost_from_the_start_is_told_too(stub: Stub) -> None:
    stub.set("count", 2)
    stub.set("0/all", "!15")

    async def test(heard: Heard) -> None:
        await heard.sample("gpu:0", lost=1)
        await heard.sample("gpu:1", lost=0, temp_c=41)

    listening(test)


def test_names_stay_with_the_slot_when_the_driver_counts_anew(stub: Stub) -> None:
    stub.set("count", 3)

    async def test(heard: Heard) -> None:
        await heard.sample("gpu:2", lost=0)
        stub.set("2/all", "!15")  # while a GPU is lost, NVML is started anew now and then
        await heard.says("gpu:2 (0000:3a:00.0) is lost")
        # another one is listed no more: NVML's 0 is what was 1, and so on
        stub.set("0/bus", 0x2A)
        stub.set("1/bus", 0x3A)
        stub.set("1/temp", 77)
        stub.set("count", 2)
        assert await heard.says("no longer") == "gpu:0 (0000:1a:00.0) is no longer listed by the driver"
        assert (await heard.sample("gpu:2", temp_c=77))["pci"] == "0000:3a:00.0"
        assert (await heard.sample("gpu:1", temp_c=41))["pci"] == "0000:2a:00.0"

    listening(test, timing=BRISK)


def test_a_call_that_hangs_is_left_behind_and_the_other_gpus_are_read(stub: Stub) -> None:
    stub.set("count", 3)

    async def test(heard: Heard) -> None:
        await heard.sample("gpu:2", lost=0)
        stub.set("1/temp", "hang")
        line = await heard.says("driver unresponsive")
        assert line == "driver unresponsive: gpu:1 (0000:2a:00.0) did not answer within 2 s"
        silent = (await heard.sample("gpu:1", lost=None))["v"]
        assert (set(silent), set(silent.values())) == (FAST_NAMES | SLOW_NAMES | {"lost"}, {None})
        stub.set("2/temp", 55)
        await heard.sample("gpu:2", temp_c=55)
        await heard.sample("gpu:0", temp_c=41)
        await heard.says("driver unresponsive: gpu:1")  # it was asked again
        stub.clear("1/temp")
        await heard.says("gpu:1 (0000:2a:00.0) answers again")
        await heard.sample("gpu:1", lost=0, temp_c=41)
        assert set(stub.lines("hanging")) == {"1/temp"}

    listening(test, timing=BRISK)


def test_an_nvml_that_does_not_start_is_told_and_tried_again(stub: Stub) -> None:
    stub.set("init", "hang")
    timing = Timing(interval_s=0.02, start_s=2, pause_min_s=0.01, pause_max_s=0.01)

    async def test(heard: Heard) -> None:
        assert await heard.says("driver unresponsive") == (
            "driver unresponsive: NVML has not started within 2 s"
        )
        await heard.says("driver unresponsive")
        stub.clear("init")
        await heard.says("1 GPUs are read")
        await heard.sample(lost=0)

    listening(test, timing=timing)


def test_fewer_gpus_than_the_node_has_are_told_and_looked_for(stub: Stub) -> None:
    async def test(heard: Heard) -> None:
        assert await heard.says("expected") == "1 GPUs are listed by the driver, 2 expected"
        await heard.sample("gpu:0")
        stub.set("count", 2)
        await heard.says("2 GPUs are read")
        await heard.sample("gpu:1", temp_c=41)

    listening(test, timing=BRISK, expected=2)


def test_no_driver_is_told_once_and_waited_for(stub: Stub) -> None:
    stub.set("init", "!9")

    async def test(heard: Heard) -> None:
        assert await heard.says("NVML") == "nvml: NVML cannot be used: Driver Not Loaded"
        silent = asyncio.ensure_future(heard.says(""))
        while heard.source._pause.until_s < asyncio.get_running_loop().time() + 1:  # some failures later
            assert not silent.done()
            await asyncio.sleep(0.01)
        stub.clear("init")
        assert await silent == "nvml: 1 GPUs are read, driver 999.10"

    listening(test, timing=CALM)


def test_without_a_library_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")

    async def test(heard: Heard) -> None:
        await heard.says("NVML Shared Library Not Found")

    listening(test)


def test_xids_come_through_nvml_as_the_kernel_prints_them(stub: Stub) -> None:
    stub.set("count", 2)
    whole = 0xFFFFFFFF

    async def test(heard: Heard) -> None:
        while set(stub.lines("registered")) != {"0", "1"}:
            await heard.sample()
        lines = []
        for event in (f"1 79 {whole} {whole}", "0 94 3 0", f"0 95 12 {whole}"):
            stub.set("event", event)
            lines.append(await heard.says("NVRM"))
        assert {reading.v["source"] for reading in heard.all if reading.kind == "log"} == {"nvml"}
        found = [event for line in lines for event in KernelParser().feed(line)]
        assert [(x.pci, x.xid, x.mig) for x in found if isinstance(x, Xid)] == [
            ("0000:2a:00.0", 79, ""),
            ("0000:1a:00.0", 94, "GPU-I:03 GPU-CI:00"),
            ("0000:1a:00.0", 95, "GPU-I:12"),
        ]

    listening(test, events=True)


def test_no_events_is_said_and_the_values_still_come(stub: Stub) -> None:
    stub.set("events", "!3")

    async def test(heard: Heard) -> None:
        await heard.says("Xid events cannot be had from NVML: Not Supported")
        await heard.sample(temp_c=41)

    listening(test, events=True)


def test_mig_and_links(stub: Stub) -> None:
    stub.set("0/mig", 1)
    stub.set("0/util", "!3")
    stub.set("0/link2", 0)
    for field in ("field38", "field45", "field52", "field59"):
        stub.set(f"0/{field}", "!3")  # as NVLink 5 does

    async def test(heard: Heard) -> None:
        v = (await heard.sample())["v"]
        assert (v["mig_mode"], v["util_pct"]) == (1, None)
        assert (v["nvlink_down"], v["nvlink_crc_total"], v["nvlink_recovery_total"]) == (1, None, 3 * 215)

    listening(test)


def test_links_that_are_not_wired_are_not_down(stub: Stub) -> None:
    stub.set("0/remote", 0)
    stub.set("0/link3", 0)

    async def test(heard: Heard) -> None:
        await heard.sample(nvlink_down=0)
        stub.set("0/link1", 0)
        await heard.sample(nvlink_down=1)

    listening(test, timing=Timing(interval_s=0.02, slow_s=0.05))


def test_an_older_driver_is_asked_under_its_names(
    tmp_path: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(compiled(tmp_path / "old", "-DOLD_DRIVER")))

    async def test(heard: Heard) -> None:
        v = (await heard.sample())["v"]
        assert (v["throttle"], v["mem_used_mib"], v["ecc_sram_ue_total"]) == (1, 2048, 4)
        assert v["ecc_sram_threshold"] is None

    listening(test)


def test_children_that_cannot_even_be_killed_are_few(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in uninterruptible sleep takes no signal; here the signal is not sent for a while."""
    stub.set("count", 2)
    stub.set("1/temp", "hang")
    spared: list[subprocess.Popen[bytes]] = []

    def spare(process: subprocess.Popen[bytes]) -> None:
        spared.append(process)

    async def test(heard: Heard) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(subprocess.Popen, "kill", spare)
            while heard.source.hanging() < HUNG_MAX:
                await heard.says("driver unresponsive: gpu:1")
            for _ in range(50):
                await heard.sample("gpu:0", temp_c=41)
            assert heard.source.hanging() == HUNG_MAX
            assert len(stub.lines("hanging")) == HUNG_MAX
        stub.clear("1/temp")
        for process in spared:
            process.kill()
        await heard.says("gpu:1 (0000:2a:00.0) answers again")

    listening(test, timing=BRISK)


def test_the_child_is_light(stub: Stub) -> None:
    """It is one of two processes of the agent on every node."""
    seen = "import sys, gridagent.telemetry.nvml_child, pynvml; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", seen], check=True, capture_output=True, text=True).stdout
    assert {"aiohttp", "cryptography", "asyncio", "torch", "ssl"} & set(modules.split()) == set()


@pytest.mark.parametrize(
    ("sources", "events"),
    [
        (["nvml"], True),
        (["nvml", "log:/var/log/nvidia.log"], True),
        (["nvml", "kmsg"], False),
        (["kmsg?interval=2", "nvml"], False),
        (["nvml", "log:/var/log/kern.log?as=kmsg"], False),
    ],
)
def test_nvml_tells_xids_where_no_kernel_log_is_read(
    tmp_path: Path, sources: list[str], events: bool
) -> None:
    home = Home(tmp_path)
    home.config_file.write_text(f'node = "n1"\nlisten = "10.0.0.7:7443"\nsources = {sources}\n')
    source = open_source("nvml", home, "n1")
    assert isinstance(source, Nvml)
    assert source.events is events
