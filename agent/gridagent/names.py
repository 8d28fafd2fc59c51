"""Names that stand in tables, file names, journals and metrics of the whole fleet."""

import re

#: Where jobs are named, all of them.
FLEET = "fleet"
_JOB_NAME = re.compile(r"(?!\.)[A-Za-z0-9_.:-]{1,64}")


def job_flaw(job: str) -> str:
    """Why this is no name of a job; "" if it is one."""
    if job == FLEET:
        return f"{job} is no name of a job: it stands for all jobs, e.g. in `gridctl freeze {job}`"
    if _JOB_NAME.fullmatch(job):
        return ""
    shown = ascii(job if len(job) <= 64 else f"{job[:64]}...")
    return (
        f"{shown} is no name of a job: it may hold 1 to 64 letters, digits, dots, dashes, underscores and"
        " colons, and does not begin with a dot"
    )
