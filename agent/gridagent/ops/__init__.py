"""What an operator may ask of a node: journaled before its effect, idempotent, fenced, one run at a time."""

from typing import Any, Protocol, TypeVar

import msgspec

from gridagent.errors import Refused
from gridagent.wire import OpRequest

T = TypeVar("T")


class Effect(Protocol):
    """One kind of operation."""

    def check(self, request: OpRequest) -> None:
        """Raises `Refused` if the request cannot be carried out. Changes nothing."""
        ...

    async def run(self, request: OpRequest) -> Any:
        """Carries it out and returns the value for `OpStatus`. Raises `OpFailed`."""
        ...


def arguments(request: OpRequest, kind: type[T]) -> T:
    """The request's args as a struct. Raises `Refused` that names the field."""
    try:
        return msgspec.convert(request.args, kind)
    except msgspec.ValidationError as error:
        raise Refused("bad-request", f"{request.kind}: {error}") from None
