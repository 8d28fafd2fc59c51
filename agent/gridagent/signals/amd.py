"""What the AMD kernel driver prints of a GPU: RAS errors, resets, hung rings, failed initialisation.

Forms as printed by amdgpu (drivers/gpu/drm/amd/amdgpu in the Linux kernel: amdgpu_ras.c, amdgpu_device.c,
amdgpu_job.c; amdgpu_ras.h for the number of an event in braces) and in public reports (github.com/ROCm/ROCm
issues 1886, 3766 and 4021). A ring that is "soft recovered" lost a job and nothing else.
"""

import re

import msgspec

_HEAD = re.compile(
    r"amdgpu (?P<pci>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]): {1,4}(?:amdgpu: {1,4})?"
    r"(?:\[drm\] )?(?:\*ERROR\* )?(?:\{\d{1,20}\} ?)?"
)
_COUNTED = re.compile(
    r"(?:socket: \d{1,3}, die: \d{1,3},? )?(?P<count>\d{1,12}) (?:new )?"
    r"(?P<kind>(?:correctable|uncorrectable|deferred) hardware errors?|poison consumption) detected"
)
_HANG = r"ring \S{1,40} timeout(?!, but soft recovered)"
_FORMS = (
    ("ras", re.compile(r"uncorrectable hardware error ?\(|RAS poison (?:is )?consum|poison is consumed")),
    ("ras", re.compile(r"(?:Hardware error|RAS): .{0,60}(?:fatal|uncorrectable)", re.IGNORECASE)),
    ("lost", re.compile(r"device lost from bus")),
    (
        "init_failed",
        re.compile(r"Fatal error during GPU init|(?:GPU )?init(?:ialization)? failed|probe .{0,60}failed"),
    ),
    (
        "reset_failed",
        re.compile(r"(?:ASIC|GPU) (?:reset|recovery) (?:failed|end with ret = -)|GPU Recovery Failed"),
    ),
    ("reset", re.compile(r"GPU reset(?:\(\d{1,6}\))? (?:begin|succeeded)|GPU mode[12] reset")),
    ("hang", re.compile(_HANG)),
)
_RING = re.compile(r"\[drm:amdgpu_job_timedout(?: \[amdgpu\])?\] \*ERROR\* " + _HANG)
_LOST_MEMORY = re.compile(r"\[drm\] VRAM is lost")


class AmdEvent(msgspec.Struct, frozen=True, kw_only=True):
    """`says`: ras, corrected, lost, init_failed, reset, reset_failed, hang, memory_lost."""

    says: str
    pci: str = ""  #: "" where the line names none
    count: int = 1


def amd_event(message: str) -> AmdEvent | None:
    """What a kernel message says of an AMD GPU; None for every other message."""
    if _RING.match(message):
        return AmdEvent(says="hang")
    if _LOST_MEMORY.match(message):
        return AmdEvent(says="memory_lost")
    head = _HEAD.match(message)
    if head is None:
        return None
    pci, rest = head["pci"].lower(), message[head.end() : head.end() + 300]
    if match := _COUNTED.match(rest):
        count = int(match["count"])
        if count == 0:
            return None
        says = "ras" if match["kind"].startswith(("uncorrectable", "poison")) else "corrected"
        return AmdEvent(says=says, pci=pci, count=count)
    for says, pattern in _FORMS:
        if pattern.match(rest):
            return AmdEvent(says=says, pci=pci)
    return None
