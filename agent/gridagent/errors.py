"""What goes wrong in the agent. Messages say what happened, to what, and what to do next."""

#: HTTP status of every refusal code; the code is the contract, the status a courtesy to HTTP tools.
HTTP_STATUS = {
    "bad-request": 400,
    "unknown-op": 400,
    "forbidden": 403,
    "not-found": 404,
    "busy": 409,
    "fenced": 409,
    "no-lease": 409,
    "not-owner": 409,
    "run-over": 409,
    "not-taken": 409,
    "not-idle": 409,
    "no-command": 409,
    "failed": 502,
    "starting": 503,
    "stopping": 503,
    "quarantined": 409,
    "frozen": 423,
    "disk-full": 507,
    "read-only": 507,
    "journal": 500,
    "internal": 500,
}


class AgentError(Exception):
    """Base of everything that the daemon raises on purpose."""


class ConfigError(AgentError):
    """The agent's home or its agent.toml is not usable."""


class Refused(AgentError):
    """A request is refused and nothing was changed. `code` is a stable word of `HTTP_STATUS`."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code

    @property
    def status(self) -> int:
        return HTTP_STATUS.get(self.code, 400)


class OpFailed(AgentError):
    """An accepted operation did not reach its effect, or not all of it."""


class SessionLost(OpFailed):
    """The process behind a session is gone, or nobody knows it here."""
