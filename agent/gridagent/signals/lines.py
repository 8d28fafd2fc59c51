"""Takes the wrapper off a kernel log line.

Known wrappers, as printed by dmesg (plain, -r, -T, -x, --time-format iso), by syslog with and without a
year, by journalctl (short, short-iso, short-precise, short-full), and by /dev/kmsg itself. What comes from
a process and not from the kernel is marked as such: anybody may write to a log, also a line that looks
like a driver's.
"""

import calendar
import re

import msgspec

#: The kernel cuts its own lines at about 1 kB; what is longer is read up to here.
LINE_CHARS_MAX = 8192

_MONTHS = {
    name: number
    for number, name in enumerate(
        ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"), start=1
    )
}
_ISO = (
    r"(?P<date>\d{4}-\d\d-\d\d)[T ](?P<clock>\d\d:\d\d:\d\d)(?:[.,](?P<fraction>\d{1,9}))?"
    r"(?P<zone>Z|[+-]\d\d:?\d\d)?"
)
_UPTIME = re.compile(r"\[ *(?P<uptime>\d{1,10}\.\d{1,9})\] ?")
_CTIME = re.compile(
    r"\[[A-Z][a-z]{2} (?P<month>[A-Z][a-z]{2}) {1,2}(?P<day>\d{1,2}) "
    r"(?P<clock>\d\d:\d\d:\d\d) (?P<year>\d{4})\] ?"
)
_PRIORITY = re.compile(r"<(?P<priority>\d{1,3})>")
_FACILITY = re.compile(r"(?P<facility>[a-z][a-z0-9]{1,9}) *:(?P<level>[a-z]{3,7}) *: ")
_KMSG = re.compile(r"(?P<priority>\d{1,4}),(?P<seq>\d{1,20}),(?P<usec>\d{1,20}),[^;]{1,64};")
_DMESG_ISO = re.compile(_ISO + r" (?=\S)")
_SYSLOG_ISO = re.compile(_ISO + r" (?P<host>\S{1,255}) (?P<program>[^:\[\] ]{1,64})(?:\[\d{1,10}\])?: ")
_SYSLOG = re.compile(
    r"(?P<month>[A-Z][a-z]{2}) (?P<day>[ \d]\d) (?P<clock>\d\d:\d\d:\d\d)(?:\.(?P<fraction>\d{1,9}))? "
    r"(?P<host>\S{1,255}) (?P<program>[^:\[\] ]{1,64})(?:\[\d{1,10}\])?: "
)
_FULL = re.compile(r"[A-Z][a-z]{2} (?=\d{4}-)(?P<iso>\S{10} \S{8,18}) (?P<zone>[A-Z]{3,5}) ")
_REPEATED = re.compile(r"message repeated (?P<times>\d{1,7}) times: \[ ?(?P<message>.*)\]\s*$", re.DOTALL)


class KernelLine(msgspec.Struct, frozen=True, kw_only=True):
    """A log line without its wrapper."""

    message: str
    kernel: bool = True  #: False: a process wrote it, whatever it says
    host: str = ""
    program: str = ""  #: who wrote it, where the wrapper tells
    t_unix_s: float | None = None  #: None where the wrapper has no full date; no zone is read as UTC
    uptime_s: float | None = None
    year_s: float | None = None  #: seconds since New Year, where the wrapper has a date without a year
    repeats: int = 1  #: how often the message came, where the syslog daemon has folded repeats


def unwrap(line: str) -> KernelLine:
    """The message of a log line, and what its wrapper tells. Without a known wrapper all is message."""
    line = line[:LINE_CHARS_MAX].rstrip("\r\n")
    if match := _KMSG.match(line):
        text = line[match.end() :].replace("\\x0a", "\n")
        kernel = int(match["priority"]) >> 3 == 0  # user space cannot write with the kernel's facility
        return KernelLine(message=text, kernel=kernel, uptime_s=int(match["usec"]) / 1e6)
    kernel, syslog, rest = _without_facility(line)
    if syslog and (record := _syslog(rest)):
        return record
    if match := _DMESG_ISO.match(rest):
        return KernelLine(message=rest[match.end() :], kernel=kernel, t_unix_s=_iso(match))
    if match := _CTIME.match(rest):
        t_unix_s = _unix(match["year"], _MONTHS.get(match["month"], 0), match["day"], match["clock"])
        return KernelLine(message=rest[match.end() :], kernel=kernel, t_unix_s=t_unix_s)
    message, uptime_s = _without_uptime(rest)
    return KernelLine(message=message, kernel=kernel, uptime_s=uptime_s)


def _without_facility(line: str) -> tuple[bool, bool, str]:
    """Did the kernel write the line, may a syslog wrapper follow, and what follows."""
    if match := _PRIORITY.match(line):
        return int(match["priority"]) >> 3 == 0, True, line[match.end() :]
    if match := _FACILITY.match(line):
        return match["facility"] == "kern", False, line[match.end() :]
    return True, True, line


def _syslog(rest: str) -> KernelLine | None:
    full = _FULL.match(rest)
    if full is not None:  # the zone's name stands before the host: "Sun 2026-02-22 16:24:18 UTC host ..."
        zone = "Z" if full["zone"] in ("UTC", "GMT") else ""
        rest = f"{full['iso']}{zone} {rest[full.end() :]}"
    match = _SYSLOG_ISO.match(rest) or _SYSLOG.match(rest)
    if match is None:
        return None
    message, uptime_s = _without_uptime(rest[match.end() :])
    folded = _REPEATED.match(message) if message.startswith("message repeated ") else None
    return KernelLine(
        message=folded["message"] if folded else message,
        kernel=match["program"] == "kernel",
        host=match["host"],
        program=match["program"],
        t_unix_s=_iso(match) if match.re is _SYSLOG_ISO else None,
        uptime_s=uptime_s,
        year_s=_year(match) if match.re is _SYSLOG else None,
        repeats=int(folded["times"]) if folded else 1,
    )


def _without_uptime(text: str) -> tuple[str, float | None]:
    match = _UPTIME.match(text)
    return (text[match.end() :], float(match["uptime"])) if match else (text, None)


def _iso(match: re.Match[str]) -> float | None:
    year, month, day = match["date"].split("-")
    t_unix_s = _unix(year, int(month), day, match["clock"])
    if t_unix_s is None:
        return None
    zone = match["zone"] or "Z"
    if zone != "Z":
        offset_s = int(zone[1:3]) * 3600 + int(zone[-2:]) * 60
        t_unix_s -= offset_s if zone[0] == "+" else -offset_s
    return t_unix_s + (float(f"0.{match['fraction']}") if match["fraction"] else 0.0)


def _year(match: re.Match[str]) -> float | None:
    # A leap year, so that 29 February is a date.
    t_unix_s = _unix("2000", _MONTHS.get(match["month"], 0), match["day"], match["clock"])
    begin_unix_s = _unix("2000", 1, "1", "00:00:00")
    if t_unix_s is None or begin_unix_s is None:
        return None
    return t_unix_s - begin_unix_s + (float(f"0.{match['fraction']}") if match["fraction"] else 0.0)


def _unix(year: str, month: int, day: str, clock: str) -> float | None:
    hour, minute, second = (int(part) for part in clock.split(":"))
    try:
        return float(calendar.timegm((int(year), month, int(day), hour, minute, second)))
    except ValueError:
        return None
