"""What every command works with: whose home, whether it may act, and the way to the controller."""

from typing import TYPE_CHECKING, Annotated

import typer

from gridctl.cli.gate import Consent
from gridctl.errors import Refused
from gridctl.home import Home
from gridctl.model.plans import Gate

if TYPE_CHECKING:
    from gridctl.control.client import Client

READ_ONLY = "GRIDCTL_READ_ONLY"

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; needs --reason.")]
Reason = Annotated[str, typer.Option("--reason", "-r", help="Why; the journal keeps it.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show every call that would be made, and make none.")]


class Console:
    """One invocation of `gridctl`."""

    def __init__(self, home: Home, *, read_only: bool) -> None:
        self.home = home
        self._read_only = read_only
        self._client: Client | None = None

    @classmethod
    def of(cls, context: typer.Context) -> "Console":
        """The console that the root command made."""
        found = context.find_object(cls)
        assert found is not None
        return found

    @property
    def controller(self) -> "Client":
        """The home's controller, started where none runs. Raises `Unanswered` if it does not come up."""
        if self._client is None:
            from gridctl.control import ensure

            self._client = ensure(self.home)
        return self._client

    def close(self) -> None:
        """Lets go of the controller, which goes on."""
        if self._client is not None:
            self._client.close()

    @property
    def read_only(self) -> bool:
        """By flag, by environment or by fleet.toml. Raises `ConfigError` for a broken file."""
        return bool(self._why_read_only())

    def may_act(self, what: str) -> None:
        """Raises `Refused` in read-only mode."""
        if why := self._why_read_only():
            raise Refused("read-only", f"will not {what}: {why}")

    def _why_read_only(self) -> str:
        from gridctl.control.settings import load_fleet

        if self._read_only:
            return f"read-only by --read-only or {READ_ONLY}"
        if self.home.fleet_file.exists() and load_fleet(self.home).fleet.read_only:
            return f"{self.home.fleet_file} says read_only = true"
        return ""


def gate(agreed: Consent, digest: str = "") -> Gate:
    """A consent as the controller takes it."""
    return Gate(digest=digest, who=agreed.who, reason=agreed.reason, typed=agreed.typed, yes=agreed.yes)
