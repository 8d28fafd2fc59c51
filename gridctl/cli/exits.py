"""How a command ends: the exit codes, and which error leads to which."""

import enum

from gridctl.errors import ConfigError, GridctlError, Refused, Unanswered, UsageError


class Exit(enum.IntEnum):
    """What a script may rely on. `gridctl help exit-codes` and docs/cli.md are made from this."""

    OK = 0
    ERROR = 1
    USAGE = 2
    REFUSED = 3
    NOT_FOUND = 4
    UNKNOWN = 5
    RUN_ABORTED = 6
    NOT_VERIFIED = 7
    INTERRUPTED = 130
    BROKEN_PIPE = 141


MEANINGS: dict[Exit, str] = {
    Exit.OK: "done, or what was asked for was printed",
    Exit.ERROR: "failed for a reason that has no code of its own; stderr says which",
    Exit.USAGE: "the command line or a configuration file is wrong; nothing was done",
    Exit.REFUSED: "a rule, the gate, a role, a freeze or read-only mode says no; nothing was changed",
    Exit.NOT_FOUND: "there is no node, device, job, plan, run, incident, kind or party of that name",
    Exit.UNKNOWN: "the controller or a node does not answer, so the state is unknown; look before acting",
    Exit.RUN_ABORTED: "the run ended without its swap, or is held for a person; `run show` says which",
    Exit.NOT_VERIFIED: "what was checked is not as it must be: journal, doctor, or the demo's comparison",
    Exit.INTERRUPTED: "interrupted; a run that was followed goes on, `gridctl run attach` follows it again",
    Exit.BROKEN_PIPE: "the reader of stdout went away",
}

_UNKNOWN = {"node-unreachable", "rank-silent", "outcome-unknown"}


def code_for(error: GridctlError) -> Exit:
    """The exit code that tells a script what kind of failure this is."""
    if isinstance(error, Refused):
        if error.code.startswith("unknown-"):
            return Exit.NOT_FOUND
        return Exit.UNKNOWN if error.code in _UNKNOWN else Exit.REFUSED
    if isinstance(error, Unanswered):
        return Exit.UNKNOWN
    if isinstance(error, ConfigError | UsageError):
        return Exit.USAGE
    return Exit.ERROR
