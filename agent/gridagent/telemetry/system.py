"""Source `system`: load, memory, disks and uptime, from /proc and the file systems themselves."""

import os
import re

from gridagent.telemetry import Reading
from gridagent.telemetry.polled import Probe
from gridagent.telemetry.tree import sample

_MIB = 1 << 20
#: More file systems of a node's own are somebody's mistake and are not told of.
DISKS_MAX = 64
_MEMINFO = {"mem_total_mib": "MemTotal", "mem_avail_mib": "MemAvailable", "swap_free_mib": "SwapFree"}
_OCTAL = re.compile(r"\\([0-7]{3})")
#: Images of packages are full and read-only by nature.
_IMAGES = {"squashfs", "iso9660", "erofs"}


class System(Probe):
    """Device `node`, and `disk:MOUNT` for each file system on a block device; no network's."""

    def read(self) -> list[Reading]:
        disks = self._disks()
        node = {**self._load(), **self._memory(), "disk_free_mib": self._free("")}
        known = any(value is not None for value in node.values())
        return [sample("node", node), *disks] if known else disks

    def _load(self) -> dict[str, float | None]:
        load = (self.tree.text("proc/loadavg") or "").split()
        uptime = (self.tree.text("proc/uptime") or "").split()
        killed = self._table("proc/vmstat", " ").get("oom_kill")
        return {
            "load1": _number(load[0] if load else None),
            "uptime_s": _number(uptime[0] if uptime else None),
            "oom_kill_total": _number(killed),
        }

    def _memory(self) -> dict[str, float | None]:
        table = self._table("proc/meminfo", ":")
        values: dict[str, float | None] = {}
        for metric, key in _MEMINFO.items():
            kib = _number(table.get(key, "").removesuffix(" kB"))
            values[metric] = None if kib is None else kib / 1024
        return values

    def _table(self, name: str, separator: str) -> dict[str, str]:
        rows = (line.partition(separator) for line in (self.tree.text(name) or "").splitlines())
        return {key.strip(): value.strip() for key, _, value in rows}

    def _free(self, mount: str) -> float | None:
        return self._space(mount)["free_mib"]

    def _space(self, mount: str) -> dict[str, float | None]:
        self.tree.reading = mount
        try:
            space = os.statvfs(self.tree.root / mount)
        except OSError as error:
            self.tree.trouble(mount, error)
            return dict.fromkeys(("free_mib", "total_mib", "inodes_free"))
        return {
            "free_mib": space.f_bavail * space.f_frsize / _MIB,
            "total_mib": space.f_blocks * space.f_frsize / _MIB,
            "inodes_free": space.f_favail if space.f_files else None,
        }

    def _disks(self) -> list[Reading]:
        found: dict[str, Reading] = {}  #: block device -> its first mount
        # Below another root /proc/mounts is this process's view, the first process has the node's.
        mounts = "proc/mounts" if self.tree.root == self.tree.root.parent else "proc/1/mounts"
        for line in (self.tree.text(mounts) or "").splitlines():
            fields = [_OCTAL.sub(lambda match: chr(int(match[1], 8)), field) for field in line.split(" ")]
            if len(fields) < 4 or not fields[0].startswith("/dev/") or fields[2] in _IMAGES:
                continue
            device, mount, options = fields[0], fields[1], fields[3].split(",")
            if device in found or len(found) >= DISKS_MAX or not self.tree.has(mount.lstrip("/")):
                continue
            values = {**self._space(mount.lstrip("/")), "read_only": float("ro" in options)}
            found[device] = sample(f"disk:{mount}", values, block=device)
        return list(found.values())


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None
