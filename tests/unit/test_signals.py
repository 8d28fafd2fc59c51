import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridagent.signals.bursts import Bursts
from gridagent.signals.lines import unwrap
from gridagent.signals.nvidia import Event, GpuLost, InitFailed, KernelParser, Xid, burst_key, canonical_pci
from gridagent.signals.values import number

MESSAGE = "NVRM: Xid (PCI:0000:3b:00): 94, pid=7194, name=python, Contained: SM (0x1). RST: No, D-RST: No"
CONTAINED = Xid(
    pci="0000:3b:00.0",
    xid=94,
    pid=7194,
    process="python",
    text="Contained: SM (0x1). RST: No, D-RST: No",
    reset_advice=0,
)
T = 1771777458.0  # 2026-02-22T16:24:18Z


def events(*lines: str) -> list[Event]:
    parser = KernelParser()
    return [event for line in lines for event in parser.feed(line)]


@pytest.mark.parametrize(
    ("prefix", "host", "t_unix_s", "uptime_s"),
    [
        ("", "", None, None),
        ("[ 1843.308145] ", "", None, 1843.308145),
        ("[1843.308145] ", "", None, 1843.308145),
        ("[Sun Feb 22 16:24:18 2026] ", "", T, None),
        ("kern  :err   : 2026-02-22T16:24:18,859532+00:00 ", "", T + 0.859532, None),
        ("kern  :warn  : [ 1843.308145] ", "", None, 1843.308145),
        ("2026-02-22T16:24:18,859532+00:00 ", "", T + 0.859532, None),
        ("2026-02-22T18:24:18.5+02:00 gpu-a01 kernel: ", "gpu-a01", T + 0.5, None),
        ("Feb 22 16:24:18 gpu-a01 kernel: ", "gpu-a01", None, None),
        ("Feb  2 16:24:18 gpu-a01 kernel: [ 1843.308145] ", "gpu-a01", None, 1843.308145),
        ("3,4411,1843308145,-;", "", None, 1843.308145),
    ],
)
def test_every_wrapper_gives_the_same_event(
    prefix: str, host: str, t_unix_s: float | None, uptime_s: float | None
) -> None:
    line = unwrap(prefix + MESSAGE + "\n")
    assert (line.message, line.kernel, line.host) == (MESSAGE, True, host)
    assert (line.t_unix_s, line.uptime_s) == (t_unix_s, uptime_s)
    assert events(prefix + MESSAGE + "\n") == [CONTAINED]


def test_impossible_dates_are_no_dates() -> None:
    assert unwrap("2026-99-22T16:24:18Z h kernel: x").t_unix_s is None
    assert unwrap("[Sun Xyz 22 16:24:18 2026] x").t_unix_s is None


@pytest.mark.parametrize(
    "line",
    [
        "[ 903.1] python3[991]: NVRM: Xid (PCI:0000:5d:00): 79, pid=1, name=x, GPU has fallen off the bus.",
        "Feb 22 16:24:18 gpu-a01 python3[991]: NVRM: Xid (PCI:0000:5d:00): 79, GPU has fallen off the bus.",
        "12,7,5,-;NVRM: Xid (PCI:0000:5d:00): 79, pid=1, name=x, GPU has fallen off the bus.",
        "user  :err   : [ 903.1] NVRM: Xid (PCI:0000:5d:00): 79, pid=1, name=x, GPU has fallen off the bus.",
        "[ 1.0] audit: comm=NVRM: Xid (PCI:0000:5d:00): 79, GPU has fallen off the bus.",
        "[ 1.0] NVRM: Xid (PCI:0000:5d:00): seventy-nine, GPU",
    ],
)
def test_what_a_process_wrote_is_no_kernel_event(line: str) -> None:
    assert events(line) == []


@pytest.mark.parametrize(
    "name", ["python3", "my job, v2", "ray::T(rank=3)", "Xid (PCI:0000:", "nvc:[driver]", ""]
)
def test_process_names_forge_nothing(name: str) -> None:
    for text in ("Ch 00000008", "GPU has fallen off the bus.", "channel 0x0000000d, errorString X, Info 0x1"):
        line = f"[ 1.5] NVRM: Xid (PCI:0000:3b:00): 43, pid=42, name={name}, {text}"
        assert events(line) == [Xid(pci="0000:3b:00.0", xid=43, pid=42, process=name, text=text)]


@pytest.mark.parametrize(
    ("line", "event"),
    [
        (
            "NVRM: Xid (0000:03:00): 14, Channel 00000001",
            Xid(pci="0000:03:00.0", xid=14, text="Channel 00000001"),
        ),
        ("NVRM: Xid (PCI:0000:3B:00.1): 79", Xid(pci="0000:3b:00.1", xid=79)),
        (
            "NVRM: Xid (PCI:0000:cb:00): 62, pid='<unknown>', name=<unknown>, 2027f6be 00007ac8",
            Xid(pci="0000:cb:00.0", xid=62, text="2027f6be 00007ac8"),
        ),
        (
            "NVRM: Xid (PCI:0000:cb:00): 31, pid=7, name=<unknown>, Ch 00000008",
            Xid(pci="0000:cb:00.0", xid=31, pid=7, text="Ch 00000008"),
        ),
        (
            "NVRM: Xid (PCI:0000:3b:00 GPU-I:05 GPU-CI:00): 43, pid=7, name=a, Ch 1",
            Xid(pci="0000:3b:00.0", xid=43, pid=7, process="a", text="Ch 1", mig="GPU-I:05 GPU-CI:00"),
        ),
        (
            "NVRM: Xid (PCI:0000:d4:00): 45, pid=7, name=a, Ch 00000001 caused by previous Xid 149",
            Xid(
                pci="0000:d4:00.0",
                xid=45,
                pid=7,
                process="a",
                text="Ch 00000001 caused by previous Xid 149",
                caused_by=149,
            ),
        ),
        (
            "NVRM: Xid (PCI:0000:9c:00): 154, "
            "GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)",
            Xid(
                pci="0000:9c:00.0",
                xid=154,
                text="GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)",
                recovery_action=4,
            ),
        ),
        (
            "NVRM: Xid (PCI:0018:01:00): 145, RLW_SRC_TRACK Nonfatal XC1 i0 Link 12 (0x04)",
            Xid(pci="0018:01:00.0", xid=145, text="RLW_SRC_TRACK Nonfatal XC1 i0 Link 12 (0x04)"),
        ),
        (
            "NVRM: Xid (PCI:what): 79, GPU has fallen off the bus.",
            Xid(pci="", xid=79, text="GPU has fallen off the bus."),
        ),
        ("NVRM: GPU 0000:05:00.0: GPU has fallen off the bus.", GpuLost(pci="0000:05:00.0")),
        ("NVRM: GPU 0000:0a:00.0: RmInitAdapter failed! (0x24:0x72:1568)", InitFailed(pci="0000:0a:00.0")),
    ],
)
def test_forms(line: str, event: Event) -> None:
    assert events(f"[ 12.5] {line}") == [event]


def test_off_the_bus_without_a_number_in_pieces_between_other_records() -> None:
    at = "2026-03-11T02:14:09.118201+00:00 gpu-a07"
    lines = (
        f"{at} kernel: NVRM: The NVIDIA GPU 0000:9b:00.0",
        f"{at} kernel: NVRM: (PCI ID: 10de:2330) installed in this system has",
        f"{at} systemd[1]: Started Session 4411 of user alice.",
        f"{at} kernel: NVRM: fallen off the bus and is not responding to commands.",
        f"{at} kernel: NVRM: The NVIDIA probe routine failed for 1 device(s).",
    )
    assert events(*lines) == [GpuLost(pci="0000:9b:00.0")]
    assert events(lines[0], *["[ 1.0] other"] * 100, lines[3]) == [GpuLost(pci="")]
    one = (
        "NVRM: The NVIDIA GPU 0000:9b:00.0 (PCI ID: 10de:2330) installed in this system has "
        "fallen off the bus and is not responding to commands."
    )
    assert events(one) == [GpuLost(pci="0000:9b:00.0")]
    escaped = (
        "3,1,5,-;NVRM: The NVIDIA GPU 0000:9b:00.0\\x0aNVRM: (PCI ID: 10de:2330) installed in this system has"
    )
    assert events(escaped + "\\x0aNVRM: fallen off the bus and is not responding to commands.") == [
        GpuLost(pci="0000:9b:00.0")
    ]


@given(st.text(max_size=300))
def test_no_text_raises(text: str) -> None:
    for line in (
        text,
        f"NVRM: Xid ({text}",
        f"NVRM: Xid (PCI:0000:3b:00): 154, {text}",
        f"NVRM: GPU {text}: GPU",
    ):
        events(line, f"3,1,2,-;{line}", f"Feb 22 16:24:18 h kernel: {line}")
    number(text)
    canonical_pci(text)


@given(st.text(alphabet="ab ,()[]:\n", max_size=15), st.integers(0, 999))
def test_number_and_device_never_come_from_the_name(name: str, xid: int) -> None:
    found = events(f"[ 1.5] NVRM: Xid (PCI:0000:3b:00): {xid}, pid=42, name={name}, Ch 00000008")
    assert all(isinstance(e, Xid) and (e.pci, e.xid) == ("0000:3b:00.0", xid) for e in found)
    assert len(found) == (0 if "\n" in name and not found else 1)


@pytest.mark.parametrize(
    "filler", [" ", "0", "a", ",", "(", "[", "name=", "PCI:0000:", ", pid=1, name=", "\n"]
)
def test_time_grows_no_faster_than_the_line(filler: str) -> None:
    """A line a hundred times longer may cost at most some hundred times more (generous: loaded machines)."""

    def cost_s(count: int) -> float:
        line = f"[ 1.5] NVRM: Xid (PCI:0000:3b:00): 154, pid=1, name={filler * count}"
        best = 1.0
        for _ in range(5):
            begin = time.process_time()
            events(line)
            best = min(best, time.process_time() - begin)
        return best

    assert cost_s(200_000) < 2000 * max(cost_s(200), 5e-6)


def test_pci_addresses() -> None:
    for text in ("0000:9B:00.0", "PCI:0000:9b:00", "00000000:9B:00.0", " 0000:9b:00 "):
        assert canonical_pci(text) == "0000:9b:00.0"
    for text in ("", "9b:00.0", "0000:9b:00.0.0", "0000:9b:000", "PCI:zzzz:9b:00"):
        assert canonical_pci(text) == ""


def test_unknown_is_not_zero() -> None:
    for unknown in (
        None, "", "N/A", "[N/A]", "[Not Supported]", "[Unknown Error]", "ERR!", "nan", "inf", float("nan"),
        True, [], {}, 0x7FFFFFF0, 0x7FFFFFF3, 0x7FFFFFFFFFFFFFF1, 2.0**47, 2.0**47 + 3, 10**400,
    ):  # fmt: skip
        assert number(unknown) is None
    for value, expected in (
        (0, 0.0),
        ("0", 0.0),
        (" 17.5 ", 17.5),
        (-1, -1.0),
        (2**31 - 1000, 2.0**31 - 1000),
    ):
        assert number(value) == expected


def test_a_teardown_flood_is_one_burst_a_process() -> None:
    bursts = Bursts(gap_s=5.0)
    new = 0
    for index in range(1000):
        (event,) = events(f"NVRM: Xid (PCI:0000:3b:00): 45, pid={7 + index % 2}, name=a, Ch {index:08x}")
        new += bursts.add(burst_key(event), index * 0.001)
    assert new == 2
    assert bursts.count(burst_key(event)) == 500
    assert bursts.add(burst_key(event), 100.0)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 30)), max_size=40).map(
        lambda items: sorted(items, key=lambda item: item[1])
    )
)
def test_bursts_against_a_slow_twin(items: list[tuple[str, float]]) -> None:
    bursts = Bursts(gap_s=5.0)
    for index, (key, t_s) in enumerate(items):
        earlier = [t for k, t in items[:index] if k == key]
        assert bursts.add(key, t_s) == (not earlier or t_s - earlier[-1] > 5.0)


def test_bursts_are_bounded() -> None:
    bursts = Bursts(keys_max=10)
    for index in range(1000):
        assert bursts.add(index, 0.0)
    assert len(bursts._seen) == 10
