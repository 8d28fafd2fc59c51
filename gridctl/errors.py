"""The errors that the operator's side raises on purpose."""

from gridagent.wire import Blocker


class GridctlError(Exception):
    """Base of all errors of gridctl. The message says what happened, to what, and what to do next."""


class ConfigError(GridctlError):
    """A file of the operator's home is missing or wrong."""


class UsageError(GridctlError):
    """What somebody gave on the command line cannot be used."""


class Unanswered(GridctlError):
    """The controller gave no answer."""


class Hangs(Unanswered):
    """The controller is there and gives no answer in time: another one could not take its place."""


class Refused(GridctlError):
    """Something was asked for and is not done; nothing was changed.

    `code` is one of `gridctl.model.refusals.MEANINGS` (or a code of an agent), `blockers` is all that
    the pre-flight found, not only the first.
    """

    def __init__(self, code: str, text: str, blockers: tuple[Blocker, ...] = ()) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.blockers = blockers
