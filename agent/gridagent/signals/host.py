"""What the kernel says of the machine around the GPUs: boots, memory, heat, hung tasks, slots, drives.

Forms as printed by the Linux kernel (drivers/edac/edac_mc.c, arch/x86 therm_throt.c, kernel/hung_task.c,
mm/oom_kill.c, drivers/nvme/host), by the mlx5 driver, and by systemd-journald. Names of tasks are their
users' choice: data, and never what decides by itself.
"""

import re

import msgspec

_BOOT = re.compile(r"Linux version \d|Command line: BOOT_IMAGE=|-- (?:Reboot|Boot [0-9a-f]{8,32}) ?-*")
_EDAC = re.compile(
    r"EDAC (?:\S{1,20} )?MC(?P<mc>\d{1,3}): (?P<count>\d{1,12}) (?P<kind>CE|UE) (?P<rest>.{0,600})", re.DOTALL
)
_DIMM = re.compile(r".{0,120}? on (?P<dimm>.{1,120}?) \(", re.DOTALL)
_HEAT = re.compile(
    r"(?:mce: )?CPU(?P<cpu>\d{1,5}): (?P<scope>Core|Package) temperature"
    r"(?: (?P<above>above threshold), cpu clock throttled \(total events = (?P<total>\d{1,12})\)"
    r"|/speed normal)"
)
_HUNG = re.compile(
    r"INFO: task (?P<task>.{1,32}):\d{1,10} blocked for more than (?P<seconds>\d{1,6}) seconds"
)
_SLOT = re.compile(
    r"mlx5_core (?P<pci>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])[: ].{0,80}?"
    r"Detected insufficient power on the PCIe slot \((?P<watts>\d{1,4})W\)"
)
_OOM = re.compile(
    r"(?P<scope>Memory cgroup out of memory|Out of memory)(?:: |, )"
    r"Kill(?:ed)? process \d{1,10} \((?P<task>.{1,32}?)\)"
)
_DRIVE = re.compile(
    r"nvme (?P<drive>nvme\d{1,4}): (?:(?P<lost>Removing after probe failure|"
    r"Disabling device after reset failure|Device not ready; aborting|"
    r"controller is down; will reset: CSTS=0xffffffff)|I/O .{0,60}timeout)"
)
_BLOCK = re.compile(
    r"(?:blk_update_request: |print_req_error: )?(?:(?:critical )?(?:medium|target) error|I/O error), dev "
    r"(?P<drive>[a-z0-9]{2,32}), sector"
)
_FILES = re.compile(
    r"(?:EXT4-fs|XFS|BTRFS|btrfs)(?: \S{1,20})? \((?:device )?(?P<drive>[\w-]{1,40})\)?.{0,200}?"
    r"(?:Remounting filesystem read-only|[Ss]hutting down filesystem|forced readonly)"
)
_RESET_REQUIRED = re.compile(r"NVRM: (?!Xid).{0,200}NV_ERR_RESET_REQUIRED")
_OUT_OF_SYNC = re.compile(r"NVRM: (?!Xid).{0,200}NV_ERR_FABRIC_STATE_OUT_OF_SYNC")
_GAP = re.compile(r"/dev/kmsg buffer overrun, some messages lost|(?:imjournal|imuxsock).{0,60}lost")


class HostEvent(msgspec.Struct, frozen=True, kw_only=True):
    """`says`: boot, ce, ue, hot, cool, hung, slot_power, oom, drive_lost, drive_error, reset_required,
    fabric_out_of_sync, gap."""

    says: str
    unit: str = ""  #: the DIMM, CPU, task, device or drive that is meant
    count: int = 1  #: errors, or watts, or the CPU's own count of events
    mark: str = ""  #: OVERFLOW; Core or Package; cgroup


def host_event(message: str) -> HostEvent | None:
    """What a kernel message says of the machine; None for every other message."""
    if _BOOT.match(message):
        return HostEvent(says="boot")
    if match := _EDAC.match(message):
        return _memory(match)
    if match := _HEAT.match(message):
        says = "hot" if match["above"] else "cool"
        return HostEvent(
            says=says, unit=f"CPU{match['cpu']}", count=int(match["total"] or 0), mark=match["scope"]
        )
    if match := _HUNG.match(message):
        return HostEvent(says="hung", unit=match["task"], count=int(match["seconds"]))
    if match := _SLOT.match(message):
        return HostEvent(says="slot_power", unit=match["pci"].lower(), count=int(match["watts"]))
    if match := _OOM.match(message):
        return HostEvent(
            says="oom", unit=match["task"], mark="cgroup" if match["scope"].startswith("Mem") else ""
        )
    return _drive(message) or _driver(message)


def log_gap(message: str) -> HostEvent | None:
    """A log keeper's word that records were lost; `message` is one of a process, not of the kernel."""
    return HostEvent(says="gap") if _GAP.search(message[:300]) else None


def _memory(match: re.Match[str]) -> HostEvent:
    where = _DIMM.match(match["rest"])
    return HostEvent(
        says=match["kind"].lower(),
        unit=where["dimm"] if where else f"MC{match['mc']}",
        count=int(match["count"]),
        mark="OVERFLOW" if "OVERFLOW" in match["rest"] else "",
    )


def _drive(message: str) -> HostEvent | None:
    if match := _DRIVE.match(message):
        return HostEvent(says="drive_lost" if match["lost"] else "drive_error", unit=match["drive"])
    if match := _BLOCK.match(message):
        return HostEvent(says="drive_error", unit=match["drive"])
    if match := _FILES.match(message):
        return HostEvent(says="drive_lost", unit=match["drive"])
    return None


def _driver(message: str) -> HostEvent | None:
    if _RESET_REQUIRED.match(message):
        return HostEvent(says="reset_required")
    return HostEvent(says="fabric_out_of_sync") if _OUT_OF_SYNC.match(message) else None
