"""What this process's agent may ask of it about hand-overs; each is carried out by a `Driver`."""

import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from gridagent import wire
from gridagent.train.channels import MEET_TIMEOUT_S
from gridagent.train.context import CONTEXT
from gridagent.train.driver import Driver, end_process
from gridagent.train.errors import HandoverError
from gridagent.train.link import LinkError
from gridagent.train.sealed import SealedError
from gridagent.train.transaction_events import Refuse

if TYPE_CHECKING:
    from gridagent.train.session import Session


#: A source hears of the commit within this time after the others run, unless it is not frozen at all.
_COMMIT_S = 10.0


def refuse_other(spare: wire.Specialise | None, args: dict[str, Any]) -> None:
    """Raises `HandoverError` unless `spare` was specialised for the hand-over that wants it to end.

    A spare has no rank yet while it warms up for one hand-over, and another that lost it must not end it.
    """
    handover = str(args.get("handover", ""))
    if spare is None:
        raise HandoverError(f"this spare was not specialised for hand-over {handover}: it stays parked")
    if spare.handover != handover:
        raise HandoverError(f"this process was specialised for hand-over {spare.handover}, not {handover}")


class Handovers:
    """What the agent may ask of this process about hand-overs. At most one is live at a time."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._driver: Driver | None = None
        self._changed = threading.Condition()
        self.frozen = False  #: this process gave its rank away and waits to be released
        self.handlers: dict[str, Callable[[dict[str, Any]], Any]] = {
            "open": self._open,
            "meet": self._meet,
            "join": self._join,
            "cut": self._cut,
            "abort": self._abort,
            "release": self._release,
            "retire": self._retire,
        }

    # Called by the training thread.

    def reached(self, step: int) -> None:
        """The training thread stands before `step`."""
        driver = self._driver
        if driver is None or not driver.live:  # dropped in this very moment
            self._session.go_on()
        else:
            driver.reached(step)

    def refuse(self, why: str) -> None:
        """The process is in no state for a hand-over."""
        if self._driver is not None:
            self._driver.post("member", Refuse(why))

    # Called by the driver's thread.

    def left(self, bound_s: float) -> None:
        """The new epoch runs, and this process, which gave its rank away, has no way back.

        A controller releases it after the watch. Where none does, it ends by itself after `bound_s`: it
        holds nothing that anybody needs.
        """
        timer = threading.Timer(bound_s, self._unreleased, args=(bound_s,))
        timer.daemon = True
        timer.start()

    def _unreleased(self, bound_s: float) -> None:
        print(
            f"gridagent: rank {self._session.rank} trains elsewhere, and nobody released its old process"
            f" within {bound_s:g} s: it ends by itself",
            file=sys.stderr,
        )
        end_process(self._session, "released", 0)

    # Called by threads of the link.

    def _start(self, driver: "Driver") -> None:
        with self._changed:
            if self._driver is not None and self._driver.live:
                if self._driver.handover == driver.handover:
                    raise HandoverError(f"hand-over {driver.handover} is prepared in this process already")
                raise HandoverError(f"hand-over {self._driver.handover} is under way in this process")
            self._driver = driver
            self._changed.notify_all()

    def _get(self, handover: str, wait_s: float = 0.0) -> "Driver":
        with self._changed:
            self._changed.wait_for(
                lambda: self._driver is not None and self._driver.handover == handover, timeout=wait_s
            )
            if self._driver is None or self._driver.handover != handover:
                raise HandoverError(f"hand-over {handover} is not known to this process")
            return self._driver

    def _open(self, args: dict[str, Any]) -> Any:
        order = msgspec.convert(args, wire.HandoverOpen)
        self._check_epoch(order.epoch_from)
        driver = Driver(self._session, order.handover, order.epoch_from, order.members, order.ttl_s)
        offer = driver.open_chair()
        try:
            self._start(driver)
        except HandoverError:
            driver.drop()
            raise
        return wire.plain(offer)

    def _meet(self, args: dict[str, Any]) -> Any:
        request = msgspec.convert(args, wire.MeetRequest)
        return wire.plain(self._get(request.handover, wait_s=MEET_TIMEOUT_S).meet(request))

    def _join(self, args: dict[str, Any]) -> Any:
        order = msgspec.convert(args, wire.HandoverJoin)
        self._check_epoch(order.epoch_from)
        if order.me.session != order.chair.session:
            driver = Driver(self._session, order.handover, order.epoch_from, order.members, order.ttl_s)
            self._start(driver)
        else:
            driver = self._get(order.handover)
        try:
            driver.join(order)
        except (SealedError, LinkError, HandoverError, RuntimeError, ValueError) as error:
            driver.drop()
            raise HandoverError(f"cannot join hand-over {order.handover}: {error}") from error
        return {}

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self._session.epoch:
            raise HandoverError(
                f"this process is in epoch {self._session.epoch}, not {epoch}: make a new plan"
            )
        if self.frozen:
            raise HandoverError("this process has given its rank away and is frozen")

    def _cut(self, args: dict[str, Any]) -> Any:
        order = msgspec.convert(args, wire.HandoverCut)
        return wire.plain(self._get(order.handover).cut(order))

    def _abort(self, args: dict[str, Any]) -> Any:
        self._get(str(args["handover"])).cancel(str(args.get("reason", "aborted")))
        return {}

    def freeze(self) -> None:
        """The rank is given away."""
        with self._changed:
            self.frozen = True
            self._changed.notify_all()

    def _release(self, args: dict[str, Any]) -> Any:
        driver = self._driver
        if driver is not None and driver.handover == args.get("handover"):
            # The others run without asking the old process: it may be told to go before it heard of Commit.
            with self._changed:
                self._changed.wait_for(lambda: self.frozen, timeout=_COMMIT_S)
        if not self.frozen:
            raise HandoverError("this process holds its rank: only a frozen source can be released")
        threading.Timer(0.2, end_process, args=(self._session, "released", 0)).start()
        return {}

    def _retire(self, args: dict[str, Any]) -> Any:
        refuse_other(CONTEXT.spare, args)
        if self._session.is_owner or self.frozen:
            raise HandoverError("this process is no spare: it holds or held a rank")
        threading.Timer(0.2, end_process, args=(self._session, "retired", 0)).start()
        return {}
