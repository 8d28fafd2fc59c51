"""The demo's own error."""

from gridctl.errors import GridctlError


class DemoError(GridctlError):
    """The demo could not be carried through; `tail` is the end of the log that tells why."""

    def __init__(self, what: str, tail: str = "") -> None:
        super().__init__(f"{what}\n{tail}".rstrip())
