"""What a network driver counts beyond /sys: its statistics by name, as `ethtool -S` shows them.

Asked through the ioctl SIOCETHTOOL (linux/ethtool.h: GSSET_INFO, GSTRINGS, GSTATS), which needs no privilege
and knows the interfaces of this process's own network namespace only.
"""

import array
import fcntl
import re
import socket
import struct
from collections.abc import Callable, Mapping

_SIOCETHTOOL = 0x8946
_GSSET_INFO, _GSTRINGS, _GSTATS = 0x37, 0x1B, 0x1D
_SS_STATS = 1
_NAME_BYTES = 32
#: A driver with many queues has some thousand; what is beyond is not asked for.
_COUNT_MAX = 1 << 15
#: Names of pause frames by metric. A port has global pause or pause by priority, and drivers count the same
#: frames under several names: what one name says in sum over its priorities is taken, the largest of all.
#: Sources: the kernel's documentation of mlx5 (device_drivers, ethernet, mellanox, counters); bnxt_ethtool.c.
PAUSES: dict[str, tuple[str, ...]] = {
    f"{way}_pause_total": (
        f"{way}_prio[0-7]_pause",
        f"{way}_global_pause",
        f"{way}_pause_ctrl_phy",
        f"{way}_pfc_ena_frames_pri[0-7]",
        f"{way}_pause_frames",
    )
    for way in ("rx", "tx")
}

#: (interface, request) -> nothing; the answer stands in the request. Raises `OSError`.
Ask = Callable[[str, "array.array[int]"], None]


def ask_kernel(interface: str, request: "array.array[int]") -> None:
    """One ethtool command to the driver of an interface. Raises `OSError` where it has no answer."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        address, _ = request.buffer_info()
        name = interface.encode(errors="surrogateescape")[:15]
        fcntl.ioctl(channel, _SIOCETHTOOL, struct.pack("16sP", name, address))


def statistics(interface: str, ask: Ask = ask_kernel) -> dict[str, int]:
    """The driver's statistics by name; none where it has none, or the interface is not there."""
    try:
        count = min(_size(interface, ask), _COUNT_MAX)
        names = array.array(
            "B", struct.pack("=III", _GSTRINGS, _SS_STATS, count) + bytes(count * _NAME_BYTES)
        )
        ask(interface, names)
        values = array.array("B", struct.pack("=II", _GSTATS, count) + bytes(count * 8))
        ask(interface, values)
    except OSError:
        return {}
    texts = names.tobytes()[12:]
    numbers = struct.unpack(f"={count}Q", values.tobytes()[8:])
    cut = (texts[at : at + _NAME_BYTES] for at in range(0, len(texts), _NAME_BYTES))
    return {
        text.split(b"\0")[0].decode(errors="replace").strip(): number
        for text, number in zip(cut, numbers, strict=True)
    }


def _size(interface: str, ask: Ask) -> int:
    request = array.array("B", struct.pack("=IIQI", _GSSET_INFO, 0, 1 << _SS_STATS, 0))
    ask(interface, request)
    _, _, mask, count = struct.unpack("=IIQI", request.tobytes())
    return int(count) if mask else 0


def pauses(counted: Mapping[str, int]) -> dict[str, float | None]:
    """The pause frames received and sent since the driver was loaded; None where it counts none."""
    found: dict[str, float | None] = {}
    for metric, forms in PAUSES.items():
        families = [[n for name, n in counted.items() if re.fullmatch(form, name)] for form in forms]
        found[metric] = max((sum(family) for family in families if family), default=None)
    return found
