"""The sources that read /sys and /proc, over small trees of files; the arithmetic of counters by property."""

import errno
import os
import struct
from array import array
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridagent.telemetry import Reading
from gridagent.telemetry.ethernet import SLOW_S, Ethernet
from gridagent.telemetry.ethtool import pauses, statistics
from gridagent.telemetry.files import PROBES
from gridagent.telemetry.infiniband import COUNTERS_S, InfiniBand
from gridagent.telemetry.polled import Probe
from gridagent.telemetry.tree import TROUBLES_MAX, Tree

Files = dict[str, object]


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def plant(root: Path, files: Files) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def probe_of(name: str, root: Path, clock: Callable[[], float] | None = None) -> Probe:
    return PROBES[name](Tree(root, name), clock or Clock())


def values(readings: list[Reading]) -> dict[str, dict[str, float | None]]:
    return {reading.v["device"]: reading.v["v"] for reading in readings if reading.kind == "sample"}


# ---- where there is nothing


@pytest.mark.parametrize("name", sorted(PROBES))
def test_absent_hardware_gives_no_reading_and_no_error(tmp_path: Path, name: str) -> None:
    probe = probe_of(name, tmp_path / "nothing")
    assert (probe.read(), probe.tree.troubles()) == ([], [])


@pytest.mark.parametrize("name", sorted(PROBES))
def test_the_machine_of_this_test_can_be_read(name: str) -> None:
    for reading in probe_of(name, Path("/")).read():
        assert reading.kind == "sample"
        assert all(value is None or value >= 0 for value in reading.v["v"].values()), reading


# ---- ports

PORT = "sys/class/infiniband/mlx5_3/ports/1"


def test_an_infiniband_port(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {
            f"{PORT}/state": "4: ACTIVE",
            f"{PORT}/rate": "200 Gb/sec (4X HDR)",
            f"{PORT}/counters/link_downed": 3,
            f"{PORT}/counters/port_rcv_data": 2**63,
            f"{PORT}/counters/symbol_error": "N/A (no PMA)",
            f"{PORT}/hw_counters/out_of_sequence": 17,
            f"{PORT}/hw_counters/np_cnp_sent": 5,
            f"{PORT}/hw_counters/rp_cnp_handled": 6,
            f"{PORT}/hw_counters/np_ecn_marked_roce_packets": 4,
        },
    )
    port = values(probe_of("infiniband", tmp_path).read())["nic:mlx5_3/1"]
    assert (port["state"], port["rate_gbps"]) == (1, 200.0)
    assert (port["link_downed_total"], port["rx_bytes_total"]) == (3, 2**65)
    assert (port["out_of_sequence_total"], port["cnp_total"], port["ecn_marked_total"]) == (17, 11, 4)
    assert port["symbol_err_total"] is None
    assert port["rnr_nak_retry_total"] is None


def test_counters_kept_with_the_adapter_and_by_other_names(tmp_path: Path) -> None:
    adapter = "sys/class/infiniband/irdma0"
    plant(
        tmp_path,
        {
            f"{adapter}/ports/1/state": "1: DOWN",
            f"{adapter}/hw_counters/cnpSent": 2,
            f"{adapter}/hw_counters/RxECNMrkd": 9,
        },
    )
    port = values(probe_of("infiniband", tmp_path).read())["nic:irdma0/1"]
    assert (port["state"], port["cnp_total"], port["ecn_marked_total"]) == (0, 2, 9)


def test_counters_of_firmware_are_read_at_most_once_in_ten_seconds(tmp_path: Path) -> None:
    plant(tmp_path, {f"{PORT}/state": "4: ACTIVE", f"{PORT}/counters/link_downed": 0})
    opened: list[str] = []

    class Watched(Tree):
        def text(self, name: str) -> str | None:
            opened.append(name)
            return super().text(name)

    clock = Clock()
    probe = InfiniBand(Watched(tmp_path, "infiniband"), clock)
    for _ in range(35):
        probe.read()
        clock.now_s += 1.0
    states = [name for name in opened if name.endswith("/state")]
    counters = [name for name in opened if name.endswith("/link_downed")]
    assert (len(states), len(counters)) == (35, 1 + int(34 // COUNTERS_S))


def test_an_ethernet_port(tmp_path: Path) -> None:
    net = "sys/class/net"
    plant(
        tmp_path,
        {
            f"{net}/eth7/operstate": "up",
            f"{net}/eth7/speed": 100000,
            f"{net}/eth7/type": 1,
            f"{net}/eth7/device/vendor": "0x15b3",
            f"{net}/eth7/carrier_down_count": 2,
            f"{net}/eth7/statistics/rx_errors": 8,
            f"{net}/eth8/operstate": "unknown",
            f"{net}/eth8/carrier": 0,
            f"{net}/eth8/speed": -1,
            f"{net}/eth8/device/vendor": "0x15b3",
            f"{net}/vf0/operstate": "up",
            f"{net}/vf0/device/physfn/vendor": "0x15b3",
            f"{net}/docker0/operstate": "down",
        },
    )
    probe = probe_of("ethernet", tmp_path)
    ports = values(probe.read())
    assert set(ports) == {"nic:eth7", "nic:eth8"}
    assert ports["nic:eth7"] | {"state": 1, "rate_gbps": 100, "rcv_err_total": 8} == ports["nic:eth7"]
    assert (ports["nic:eth8"]["state"], ports["nic:eth8"]["rate_gbps"]) == (0, None)
    assert ports["nic:eth8"]["link_downed_total"] is None
    fast = {"state": 1, "link_downed_total": 2, "carrier_changes_total": None}
    assert values(probe.read())["nic:eth7"] == fast


class Driver:
    """Answers as the kernel does for a driver with these statistics (layout of linux/ethtool.h)."""

    def __init__(self, counted: dict[str, int]) -> None:
        self.counted = counted

    def __call__(self, interface: str, request: "array[int]") -> None:
        if interface != "eth0":
            raise OSError(errno.ENODEV, "no such device")
        raw = request.tobytes()
        names, numbers = list(self.counted), list(self.counted.values())
        command = struct.unpack_from("=I", raw)[0]
        if command == 0x37:
            answer = struct.pack("=IIQI", command, 0, 2, len(names))
        elif command == 0x1B:
            assert struct.unpack_from("=II", raw, 4) == (1, len(names))
            answer = raw[:12] + b"".join(name.encode().ljust(32, b"\0") for name in names)
        else:
            assert struct.unpack_from("=II", raw) == (0x1D, len(names))
            answer = raw[:8] + struct.pack(f"={len(names)}Q", *numbers)
        assert len(answer) == len(raw)
        request[:] = array("B", answer)


def test_pause_frames_come_from_the_driver() -> None:
    counted = {"rx_packets": 5, "rx_prio0_pause": 2, "rx_prio3_pause": 40, "rx_prio3_pause_duration": 9}
    driver = Driver({**counted, "rx_pause_ctrl_phy": 7, "tx_global_pause": 3, "z" * 31: 1 << 63})
    assert statistics("eth0", driver) == driver.counted
    assert pauses(statistics("eth0", driver)) == {"rx_pause_total": 42, "tx_pause_total": 3}
    assert pauses(statistics("eth0", Driver({}))) == {"rx_pause_total": None, "tx_pause_total": None}
    assert statistics("eth1", driver) == {}


def test_the_kernel_is_asked_for_an_interface_of_its_own_only(tmp_path: Path) -> None:
    """A tree of another machine may have an interface of the same name."""
    assert statistics("lo") == {}  # by the real ioctl: the loopback counts nothing
    asked: list[str] = []
    plant(tmp_path, {"sys/class/net/lo/device/v": 1, "sys/class/net/lo/address": "02:00:00:00:00:01"})

    def ask(interface: str, request: "array[int]") -> None:
        asked.append(interface)
        raise OSError(errno.EOPNOTSUPP, "not supported")

    own = Path("/sys/class/net/lo/address").read_text()
    for address, wanted in (("02:00:00:00:00:01", []), (own, ["lo"])):
        (tmp_path / "sys/class/net/lo/address").write_text(address)
        [reading] = Ethernet(Tree(tmp_path, "ethernet"), Clock(), ask).read()
        assert reading.v["device"] == "nic:lo"
        assert asked == wanted


def test_a_name_of_any_bytes_can_be_sent(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/sys/class/net/e\xff/device"
    os.makedirs(folder)
    [reading] = probe_of("ethernet", tmp_path).read()
    assert reading.v["device"] == "nic:e\\udcff"
    assert msgspec.json.encode(reading)


# ---- counters of the bus and of memory


def test_pcie_errors_summed_over_devices_that_come_and_go(tmp_path: Path) -> None:
    first, second = "sys/bus/pci/devices/0000:07:00.0", "sys/bus/pci/devices/0000:41:00.0"
    plant(
        tmp_path,
        {
            f"{first}/aer_dev_correctable": "RxErr 1\nBadTLP 4\nTOTAL_ERR_COR 5",
            f"{second}/aer_dev_correctable": "RxErr 2\nBadTLP 1",
            f"{second}/aer_dev_fatal": "TOTAL_ERR_FATAL 0",
            "sys/bus/pci/devices/0000:00:00.0/vendor": "0x8086",
        },
    )
    probe = probe_of("aer", tmp_path)
    found = values(probe.read())
    assert found["node"] == {"aer_cor_total": 8, "aer_nonfatal_total": None, "aer_fatal_total": 0}
    assert found["pci:0000:41:00.0"] == {"aer_cor_total": 3, "aer_nonfatal_total": None, "aer_fatal_total": 0}
    (tmp_path / second / "aer_dev_correctable").unlink()
    assert values(probe.read())["node"]["aer_cor_total"] == 8
    plant(tmp_path, {f"{second}/aer_dev_correctable": "TOTAL_ERR_COR 1"})  # back after a reset
    assert values(probe.read())["node"]["aer_cor_total"] == 9


def test_memory_errors(tmp_path: Path) -> None:
    folder = "sys/devices/system/edac/mc"
    plant(
        tmp_path,
        {
            f"{folder}/mc0/ce_count": 12,
            f"{folder}/mc0/ue_count": 0,
            f"{folder}/mc0/dimm4/dimm_ce_count": 12,
            f"{folder}/mc0/dimm4/dimm_ue_count": 0,
            f"{folder}/mc0/dimm4/dimm_label": "P1_DIMM_E1",
            f"{folder}/mc0/dimm5/dimm_ce_count": 0,
            f"{folder}/mc1/ce_count": 1,
            f"{folder}/mc1/ue_count": 2,
        },
    )
    probe = probe_of("edac", tmp_path)
    readings = probe.read()
    found = values(readings)
    assert found["node"] == {"edac_ce_total": 13, "edac_ue_total": 2}
    assert found["dimm:mc0/dimm4"] == {"edac_ce_total": 12, "edac_ue_total": 0}
    assert "dimm:mc0/dimm5" not in found
    assert readings[0].v["label"] == "P1_DIMM_E1"
    plant(tmp_path, {f"{folder}/mc0/ce_count": 3})  # somebody wrote reset_counters
    assert values(probe.read())["node"]["edac_ce_total"] == 16


# ---- heat and power


def test_temperatures_and_inlet(tmp_path: Path) -> None:
    hwmon = "sys/class/hwmon"
    plant(
        tmp_path,
        {
            f"{hwmon}/hwmon0/name": "k10temp",
            f"{hwmon}/hwmon0/temp1_input": 61500,
            f"{hwmon}/hwmon0/temp1_crit": 95000,
            f"{hwmon}/hwmon0/temp2_input": 70250,
            f"{hwmon}/hwmon0/temp2_label": "Tccd3",
            f"{hwmon}/hwmon0/temp3_input": 255000,
            f"{hwmon}/hwmon0/temp4_input": 90000,
            f"{hwmon}/hwmon0/temp4_fault": 1,
            f"{hwmon}/hwmon1/device/name": "board",
            f"{hwmon}/hwmon1/device/temp1_input": 23000,
            f"{hwmon}/hwmon1/device/temp1_label": "Inlet Air",
            f"{hwmon}/hwmon1/device/fan1_input": 8000,
            f"{hwmon}/hwmon1/device/fan2_input": 0,
            f"{hwmon}/hwmon1/device/power1_input": 1_250_000_000,
            f"{hwmon}/hwmon2/name": "nvme",
            f"{hwmon}/hwmon2/temp1_input": 40000,
            f"{hwmon}/hwmon3/name": "power_meter",
            f"{hwmon}/hwmon3/power1_average": 6_400_000_000,
        },
    )
    readings = probe_of("hwmon", tmp_path).read()
    found = values(readings)
    assert found["hwmon:k10temp@hwmon0"] == {"temp_c": 70.25, "margin_c": 33.5}
    assert readings[0].v["sensor"] == "Tccd3"
    assert found["hwmon:board@hwmon1"] == {
        "temp_c": 23.0,
        "margin_c": None,
        "fan_min_rpm": 0,
        "power_w": 1250.0,
    }
    assert found["node"] == {"inlet_c": 23.0, "in_w": 6400.0}
    assert set(found) == {"hwmon:k10temp@hwmon0", "hwmon:board@hwmon1", "hwmon:power_meter@hwmon3", "node"}


def psu(number: int, name: str, volts_mv: int, watts_uw: int) -> Files:
    folder = f"sys/class/hwmon/hwmon{number}"
    return {
        f"{folder}/name": name,
        f"{folder}/in1_label": "vin",
        f"{folder}/in1_input": volts_mv,
        f"{folder}/power1_label": "pin",
        f"{folder}/power1_input": watts_uw,
    }


def test_power_supplies_and_what_only_looks_like_one(tmp_path: Path) -> None:
    plant(tmp_path, psu(0, "crps", 230_000, 1_450_000_000) | psu(1, "crps", 0, 0))
    plant(tmp_path, psu(2, "lm25066", 12_000, 300_000_000))
    plant(tmp_path, {"sys/class/hwmon/hwmon3/name": "pfe1100"})
    found = values(probe_of("hwmon", tmp_path).read())
    assert found["psu:0"] == {"in_w": 1450.0, "in_v": 230.0, "ok": 1}
    assert found["psu:1"] == {"in_w": 0.0, "in_v": 0.0, "ok": 0}
    assert found["psu:2"] == {"in_w": None, "in_v": None, "ok": None}
    assert {device for device in found if device.startswith("psu:")} == {"psu:0", "psu:1", "psu:2"}
    assert found["hwmon:lm25066@hwmon2"] == {"power_w": 300.0}


def test_a_supply_without_power_keeps_its_number(tmp_path: Path) -> None:
    plant(tmp_path, psu(4, "pmbus", 231_500, 900_000_000) | psu(5, "pmbus", 231_500, 800_000_000))
    probe = probe_of("hwmon", tmp_path)
    assert {"psu:0", "psu:1"} <= set(values(probe.read()))
    plant(tmp_path, psu(4, "pmbus", 250, 0))
    found = values(probe.read())
    assert (found["psu:0"]["ok"], found["psu:1"]["ok"], found["psu:1"]["in_w"]) == (0, 1, 800.0)


def test_cpu_power_over_the_end_of_the_counter(tmp_path: Path) -> None:
    zone = "sys/class/powercap/intel-rapl:0"
    plant(
        tmp_path,
        {
            f"{zone}/name": "package-0",
            f"{zone}/energy_uj": 900_000_000,
            f"{zone}/max_energy_range_uj": 1_000_000_000 * 60,
            f"{zone}:0/name": "dram",
            f"{zone}:0/energy_uj": 59_999_000_000,
            f"{zone}:0/max_energy_range_uj": 60_000_000_000,
            "sys/class/powercap/intel-rapl-mmio:0/name": "package-0",
        },
    )
    clock = Clock()
    probe = probe_of("rapl", tmp_path, clock)
    assert values(probe.read()) == {"cpu:0": {"power_w": None, "dram_power_w": None}}
    clock.now_s += 5
    plant(tmp_path, {f"{zone}/energy_uj": 1_900_000_000, f"{zone}:0/energy_uj": 99_000_000})
    assert values(probe.read()) == {"cpu:0": {"power_w": 200.0, "dram_power_w": 20.0}}


def test_nvme_controllers(tmp_path: Path) -> None:
    nvme = "sys/class/nvme"
    plant(
        tmp_path,
        {
            f"{nvme}/nvme1/state": "live",
            f"{nvme}/nvme1/model": "FlashCo 3T",
            f"{nvme}/nvme1/serial": "FC-0042",
            f"{nvme}/nvme1/hwmon6/temp1_input": 47850,
            f"{nvme}/nvme1/hwmon6/temp1_crit": 84850,
            f"{nvme}/nvme1/device/current_link_width": 2,
            f"{nvme}/nvme1/device/max_link_width": 4,
            f"{nvme}/nvme2/state": "dead",
        },
    )
    readings = probe_of("nvme", tmp_path).read()
    found = values(readings)
    assert found["nvme:nvme1"]["margin_c"] == pytest.approx(37.0)
    assert (found["nvme:nvme1"]["state"], found["nvme:nvme1"]["pcie_width"]) == (1, 2)
    assert (found["nvme:nvme2"]["state"], found["nvme:nvme2"]["temp_c"]) == (0, None)
    assert readings[0].v["serial"] == "FC-0042"


def test_load_memory_and_disks(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {
            "proc/loadavg": "7.25 3.00 1.00 2/512 4242",
            "proc/uptime": "86400.50 1.0",
            "proc/vmstat": "nr_free_pages 17\noom_kill 3",
            "proc/meminfo": "MemTotal:  2048 kB\nMemAvailable:  1024 kB",
            "proc/1/mounts": "\n".join(
                [
                    "/dev/md0 /scratch\\040one ext4 ro,relatime 0 0",
                    "/dev/md0 /again ext4 rw 0 0",
                    "nas:/export /nas nfs4 rw 0 0",
                    "/dev/loop3 /snap squashfs ro 0 0",
                    "/dev/sdz /not-there xfs rw 0 0",
                ]
            ),
            "scratch one/file": "",
            "nas/file": "",
        },
    )
    found = values(probe_of("system", tmp_path).read())
    node = found.pop("node")
    assert (node["load1"], node["mem_avail_mib"], node["oom_kill_total"], node["uptime_s"]) == (
        7.25,
        1.0,
        3.0,
        86400.5,
    )
    assert node["swap_free_mib"] is None
    assert node["disk_free_mib"] is not None
    assert set(found) == {"disk:/scratch one"}
    assert found["disk:/scratch one"]["read_only"] == 1


# ---- what cannot be read


class Denying(Tree):
    """Root may read everything, so the refusal is the kernel's by word only."""

    def text(self, name: str) -> str | None:
        if name.endswith("/rx_errors"):
            self.trouble(name, PermissionError(13, "Permission denied"))
            return None
        return super().text(name)


def test_a_file_that_may_not_be_read_is_told_once_and_its_value_is_null(tmp_path: Path) -> None:
    plant(tmp_path, {"sys/class/net/e0/device/v": 1, "sys/class/net/e0/statistics/rx_errors": 1})
    secret = tmp_path / "sys/class/net/e0/statistics/rx_errors"
    secret.chmod(0)
    tree = (Denying if os.geteuid() == 0 else Tree)(tmp_path, "ethernet")
    probe = Ethernet(tree, Clock())
    clock = probe.clock
    assert isinstance(clock, Clock)
    for round_ in range(3):
        clock.now_s += SLOW_S
        assert values(probe.read())["nic:e0"]["rcv_err_total"] is None
        notes = tree.troubles()
        assert len(notes) == (round_ == 0)
        for note in notes:
            assert note.v["path"] == "/sys/class/net/e0/statistics/rx_errors"
            assert "Permission denied" in note.v["text"]
            assert "action" not in note.v


def test_many_unreadable_files_do_not_flood(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "x")
    for i in range(10 * TROUBLES_MAX):
        tree.trouble(f"f{i}", PermissionError(13, "Permission denied"))
    assert len(tree.troubles()) == TROUBLES_MAX + 1


@given(st.binary(max_size=200), st.sampled_from(sorted(PROBES)))
def test_no_content_of_a_file_breaks_a_source(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, name: str
) -> None:
    root = tmp_path_factory.mktemp("any")
    for path in ODD:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    probe = probe_of(name, root)
    for reading in probe.read() + probe.read():
        assert all(value is None or value == value for value in reading.v["v"].values())


ODD = [
    f"{PORT}/state",
    f"{PORT}/rate",
    f"{PORT}/counters/link_downed",
    f"{PORT}/hw_counters/np_cnp_sent",
    "sys/class/net/e0/device/vendor",
    "sys/class/net/e0/operstate",
    "sys/class/net/e0/speed",
    "sys/bus/pci/devices/0000:01:00.0/aer_dev_fatal",
    "sys/devices/system/edac/mc/mc0/ce_count",
    "sys/devices/system/edac/mc/mc0/dimm0/dimm_ce_count",
    "sys/class/hwmon/hwmon0/name",
    "sys/class/hwmon/hwmon0/temp1_input",
    "sys/class/hwmon/hwmon0/temp1_label",
    "sys/class/hwmon/hwmon0/in1_label",
    "sys/class/hwmon/hwmon0/in1_input",
    "sys/class/powercap/intel-rapl:0/name",
    "sys/class/powercap/intel-rapl:0/energy_uj",
    "sys/class/nvme/nvme0/state",
    "proc/loadavg",
    "proc/meminfo",
    "proc/uptime",
    "proc/1/mounts",
]
