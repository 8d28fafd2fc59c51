"""Tells people what is due, again until they have got it, and writes down what was told.

What was told stands in the journal, so that a new controller goes on where the last one ended. Between a
message and its record a controller can be killed: then the message is sent once more. PagerDuty and
Alertmanager know it again by its key; a chat or a mailbox shows it twice.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Coroutine
from typing import Any, Protocol

import msgspec

from gridctl.control.ledger import Ledger
from gridctl.errors import ConfigError, Refused
from gridctl.home import Home
from gridctl.model.findings import SEVERITIES
from gridctl.model.fleet import Node
from gridctl.model.notices import Late, NotifyStatus, ReceiverStatus, Silence, SilenceWanted, in_words
from gridctl.model.runs import Incident
from gridctl.notify import messages
from gridctl.notify.config import LABELS, Config, load
from gridctl.notify.duty import Notice, Past, Subject, due
from gridctl.notify.post import NotTold, send

#: Alertmanager forgets what it holds when it is restarted: it is told again that often.
REFRESH_S = 60.0
RETRY_S, RETRY_MAX_S = 5.0, 600.0
#: Whoever could not be told for so long is not told of this any more.
GIVE_UP_S = 86400.0
AT_ONCE = 8
SILENCE_MAX_S = 92 * 86400.0

log = logging.getLogger("gridctl.control")


class World(Protocol):
    """What this needs of the controller."""

    home: Home
    ledger: Ledger

    @property
    def nodes(self) -> dict[str, Node]: ...

    @property
    def read_only(self) -> str: ...


class Trial(msgspec.Struct):
    """A notice that was not taken yet."""

    since_unix_s: float
    count: int = 0
    next_unix_s: float = 0.0
    text: str = ""


class Herald:
    """One for each controller. A read-only one tells nobody: another controller may."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.trials: dict[tuple[str, ...], Trial] = {}  #: notice's key -> why it is late
        self.misread = ""  #: what is wrong with notify.toml; what was read before stays in force
        self._config = Config()
        self._stamp = -1
        self._refreshed_s = float("-inf")
        self._sending: dict[tuple[str, ...], asyncio.Task[None]] = {}

    @property
    def past(self) -> Past:
        """What was sent."""
        return self._world.ledger.told

    async def turn(self) -> None:
        """Begins to send what is due; waits for nobody."""
        self._reread()
        if self._world.read_only or not self._config.route:
            return
        now_unix_s = time.time()
        subjects = self._subjects()
        for notice in due(now_unix_s, subjects, self._config, self.past):
            trial = self.trials.get(notice.key)
            waits = trial is not None and now_unix_s < trial.next_unix_s
            if waits or notice.key in self._sending or len(self._sending) >= AT_ONCE:
                continue
            message = messages.write(notice, [subjects[n] for n in notice.incidents if n in subjects])
            self._begin(notice.key, self._tell(message))
        loop_s = asyncio.get_running_loop().time()
        if loop_s - self._refreshed_s >= REFRESH_S and () not in self._sending:
            self._refreshed_s = loop_s
            self._begin((), self._refresh(subjects))

    def silence(self, wanted: SilenceWanted) -> Silence:
        """Tells nobody of what fits until then. Raises `Refused`."""
        now_unix_s = time.time()
        if unknown := sorted(set(wanted.match) - set(LABELS)):
            raise Refused("bad-request", f"no label {', '.join(unknown)}; there are {', '.join(LABELS)}")
        if not wanted.match or not any(pattern.strip("* ") for pattern in wanted.match.values()):
            raise Refused("bad-request", "that would silence everything: say of what, e.g. node=n3")
        if not wanted.reason.strip():
            raise Refused("not-confirmed", "a silence needs a reason; the journal keeps it")
        if not 0 < wanted.until_unix_s - now_unix_s <= SILENCE_MAX_S:
            raise Refused("bad-request", f"a silence ends, within {SILENCE_MAX_S / 86400:.0f} days")
        silence = Silence(
            id=f"s-{secrets.token_hex(4)}",
            match=wanted.match,
            until_unix_s=wanted.until_unix_s,
            who=wanted.who,
            reason=wanted.reason,
        )
        text = f"{wanted.who} silences {in_words(wanted.match)}: {wanted.reason}"
        self._world.ledger.append("audit", {"what": "silence", "text": text, **msgspec.to_builtins(silence)})
        return silence

    def unsilence(self, name: str, who: str, reason: str) -> Silence:
        """Ends a silence before its time. Raises `Refused`."""
        silence = self.past.silences.get(name)
        if silence is None or silence.until_unix_s <= time.time():
            raise Refused(
                "unknown-silence", f"there is no silence {name}: `gridctl notify status` lists them"
            )
        text = f"{who} ends the silence of {in_words(silence.match)}: {reason}"
        about = {"what": "unsilence", "id": name, "who": who, "reason": reason, "text": text}
        self._world.ledger.append("audit", about)
        return silence

    def status(self) -> NotifyStatus:
        """Who is told, of what, and what could not be told yet."""
        self._reread()
        now_unix_s = time.time()
        return NotifyStatus(
            file=str(self._world.home.notify_file),
            error=self.misread,
            read_only=self._world.read_only,
            receivers=[ReceiverStatus(r.name, r.kind, self._told_of(r.name)) for r in self._config.receiver],
            late=[
                Late(key[2], key[3], key[1], trial.count, trial.next_unix_s, trial.text)
                for key, trial in self.trials.items()
            ],
            silences=[s for s in self.past.silences.values() if s.until_unix_s > now_unix_s],
        )

    def _told_of(self, receiver: str) -> list[str]:
        return [thread.id for thread in self.past.threads.values() if receiver in thread.told]

    async def close(self) -> None:
        """Lets go of what is being sent; it is sent again by the next controller."""
        for task in self._sending.values():
            task.cancel()
        await asyncio.gather(*self._sending.values(), return_exceptions=True)

    def _begin(self, key: tuple[str, ...], work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._sending[key] = task
        task.add_done_callback(lambda _: self._sending.pop(key, None))

    async def _tell(self, message: messages.Message) -> None:
        notice = message.notice
        receiver = self._config.named(notice.receiver)
        try:
            if receiver is None:
                raise NotTold(f"notify.toml has no receiver {notice.receiver} any more", GIVE_UP_S)
            await send(receiver, message)
        except NotTold as error:
            self._late(notice, error)
            return
        self.trials.pop(notice.key, None)
        self._write(notice, "sent", message.subject)

    def _late(self, notice: Notice, error: NotTold) -> None:
        now_unix_s = time.time()
        trial = self.trials.setdefault(notice.key, Trial(now_unix_s))
        first = trial.count == 0
        trial.count += 1
        wait_s = max(error.again_s, min(RETRY_MAX_S, RETRY_S * 2.0 ** min(trial.count - 1, 20)))
        trial.next_unix_s, trial.text = now_unix_s + wait_s, str(error)
        if now_unix_s + wait_s - trial.since_unix_s > GIVE_UP_S:
            del self.trials[notice.key]
            self._write(notice, "given-up", f"{notice.receiver} was never told: {error}")
        elif first:
            self._write(notice, "failed", f"{notice.receiver} is told again and again: {error}")

    def _write(self, notice: Notice, state: str, text: str) -> None:
        told: dict[str, Any] = msgspec.to_builtins(notice)
        about = {"incident": notice.thread, "state": state, "text": messages.one_line(text)}
        with contextlib.suppress(Refused):  # no space: it is told again, which is the lesser evil
            self._world.ledger.append("notice", {**told, **about})

    async def _refresh(self, subjects: dict[str, Subject]) -> None:
        """Says again to every Alertmanager what holds; nothing of that is written down."""
        for thread in list(self.past.threads.values()):
            still = [
                subjects[name] for name in thread.incidents if name in subjects and not subjects[name].closed
            ]
            for name in thread.told.keys() - thread.closed if still else ():
                receiver = self._config.named(name)
                if receiver and receiver.kind == "alertmanager":
                    notice = Notice(
                        thread=thread.id,
                        route=thread.route,
                        receiver=name,
                        event="grown",
                        incidents=[one.id for one in still],
                    )
                    with contextlib.suppress(NotTold):
                        await send(receiver, messages.write(notice, still))

    def _subjects(self) -> dict[str, Subject]:
        told = {name for thread in self.past.threads.values() for name in thread.incidents}
        incidents = self._world.ledger.incidents
        chosen = {one.id: one for one in incidents.open()}
        chosen |= {name: found for name in told if (found := incidents.get(name))}
        return {name: self._subject(one) for name, one in chosen.items()}

    def _subject(self, one: Incident) -> Subject:
        node = self._world.nodes.get(one.node)
        severities = [str(found.get("severity")) for found in (*one.findings, one.decision) if found]
        known = [severity for severity in severities if severity in SEVERITIES]
        why = [str(line) for found in (one.decision, *one.findings[:1]) for line in found.get("why", [])]
        return Subject(
            labels={
                "incident": one.id,
                "kind": one.kind,
                "severity": max(known, key=SEVERITIES.index, default="warning"),
                "node": one.node,
                "rack": node.rack if node else "",
                "job": one.job,
                "owner": self._config.owner_of(one.job),
            },
            title=one.title,
            why=list(dict.fromkeys(why)),
            opened_unix_s=one.opened_unix_s,
            acked_by=one.acked_by,
            closed=one.state != "open",
            outcome=next((m.what for m in reversed(one.timeline) if m.kind == "incident"), ""),
        )

    def _reread(self) -> None:
        path = self._world.home.notify_file
        stamp = path.stat().st_mtime_ns if path.exists() else 0
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._config, self.misread = load(path), ""
        except ConfigError as error:
            self.misread = str(error)
            log.warning("%s; what was read before stays in force", error)
