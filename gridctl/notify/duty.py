"""Which notices are due. Pure: what is known of the incidents and what was sent go in, notices come out.

A *thread* is what is told together: the incidents of one group of a route, from the first one's opening to
the last one's end. Its id is that of the first incident; receivers know it by that.

    opened     to the route's receivers, and to those of an escalation when its time has come
    grown      others of the group have come since
    acked      everybody in it is acknowledged: whoever was told need not go on
    closed     everybody in it is closed
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from gridctl.model.notices import Silence
from gridctl.notify.config import Config, Labels, Route, matches


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """An incident as notices see it."""

    labels: Labels
    title: str
    why: list[str] = []
    opened_unix_s: float
    acked_by: str = ""
    closed: bool = False
    outcome: str = ""  #: why it was closed

    @property
    def id(self) -> str:
        return self.labels["incident"]


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """One message to one receiver."""

    thread: str
    route: str
    receiver: str
    event: str  #: opened, grown, acked, closed
    incidents: list[str]
    escalation: int = 0  #: of "opened": the level, from 1; 0 is the first word

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """What is sent once."""
        about = "" if self.event in ("acked", "closed") else " ".join(self.incidents)
        return (self.route, self.thread, self.receiver, self.event, about)


class Thread(msgspec.Struct, kw_only=True):
    """What was told so far."""

    id: str
    route: str
    incidents: list[str]
    told: dict[str, set[str]] = {}  #: receiver -> incidents that it knows of
    acked: set[str] = set()  #: receivers that know that everything is acknowledged
    closed: set[str] = set()  #: receivers that know that it is over
    opened_unix_s: float = 0.0  #: when the first receiver was told
    grown_unix_s: float = 0.0  #: when the newest word on its growth was said


class Past:
    """What was sent: a fold over the journal's records of kind `notice`, and of silences."""

    def __init__(self) -> None:
        self.threads: dict[tuple[str, str], Thread] = {}  #: (route, thread) -> those that are not over
        self.known: set[tuple[str, str]] = set()  #: (route, incident) in a thread that is not over
        self.silences: dict[str, Silence] = {}

    def take(self, kind: str, data: Mapping[str, Any], t_unix_s: float) -> None:
        """Folds one record in; one of another kind is passed over."""
        if kind == "notice" and data.get("state") in ("sent", "given-up"):
            self._sent(msgspec.convert(data, Notice), t_unix_s)
        elif kind == "audit" and data.get("what") == "silence":
            silence = msgspec.convert(data, Silence)
            self.silences[silence.id] = silence
        elif kind == "audit" and data.get("what") == "unsilence":
            self.silences.pop(str(data.get("id")), None)

    def _sent(self, notice: Notice, t_unix_s: float) -> None:
        key = (notice.route, notice.thread)
        thread = self.threads.get(key)
        if thread is None:
            if notice.event == "closed":
                return
            thread = self.threads[key] = Thread(
                id=notice.thread,
                route=notice.route,
                incidents=[],
                opened_unix_s=t_unix_s,
                grown_unix_s=t_unix_s,
            )
        self.known.update((notice.route, name) for name in notice.incidents)
        thread.incidents += [name for name in notice.incidents if name not in thread.incidents]
        if notice.event in ("opened", "grown"):
            thread.told.setdefault(notice.receiver, set()).update(notice.incidents)
            thread.acked.discard(notice.receiver)
            thread.grown_unix_s = max(thread.grown_unix_s, t_unix_s)
        elif notice.event == "acked":
            thread.acked.add(notice.receiver)
        else:
            thread.closed.add(notice.receiver)
            if thread.closed >= thread.told.keys():
                del self.threads[key]
                self.known -= {(notice.route, name) for name in thread.incidents}

    def silenced(self, labels: Labels, now_unix_s: float) -> bool:
        return any(
            now_unix_s < silence.until_unix_s and matches(silence.match, labels)
            for silence in self.silences.values()
        )


def due(now_unix_s: float, subjects: Mapping[str, Subject], config: Config, past: Past) -> list[Notice]:
    """What is to be sent now, the oldest thread first. `subjects`: by id, at least all that are open and all
    that `past` has in a thread."""
    return list(_due(now_unix_s, subjects, config, past))


def _due(now_unix_s: float, subjects: Mapping[str, Subject], config: Config, past: Past) -> Iterator[Notice]:
    routes = {route.name: route for route in config.route}
    new = _new_groups(now_unix_s, subjects, config, past)
    for (route_name, _), thread in list(past.threads.items()):
        members = [subjects[name] for name in thread.incidents if name in subjects]
        route = routes.get(route_name)
        open_members = [member for member in members if not member.closed]
        if (
            not open_members or route is None
        ):  # over; a route that is no more begins nothing and ends what it began
            if not open_members:
                yield from _ended(thread)
            continue
        joined = new.pop(route.group(open_members[0].labels), [])
        yield from _going_on(now_unix_s, route, thread, open_members, joined, past)
    for joined in sorted(new.values(), key=lambda some: some[0].opened_unix_s):
        route = config.route_of(joined[0].labels)
        assert route is not None, "only what has a route is in a new group"
        if now_unix_s >= joined[0].opened_unix_s + route.wait_s:
            names = [subject.id for subject in joined]
            for receiver in route.receivers:
                yield Notice(
                    thread=names[0], route=route.name, receiver=receiver, event="opened", incidents=names
                )


def _new_groups(
    now_unix_s: float, subjects: Mapping[str, Subject], config: Config, past: Past
) -> dict[tuple[str, ...], list[Subject]]:
    """Incidents that nobody of their route was told of, by group, the oldest first.

    One that has become worse may have another route than before, whose people hear of it then.
    """
    found: dict[tuple[str, ...], list[Subject]] = {}
    for subject in sorted(subjects.values(), key=lambda one: (one.opened_unix_s, one.id)):
        if subject.closed or subject.acked_by:
            continue
        route = config.route_of(subject.labels)
        if route is None or (route.name, subject.id) in past.known:
            continue
        if past.silenced(subject.labels, now_unix_s):
            continue
        found.setdefault(route.group(subject.labels), []).append(subject)
    return found


def _going_on(
    now_unix_s: float, route: Route, thread: Thread, members: list[Subject], joined: list[Subject], past: Past
) -> Iterator[Notice]:
    unacked = [member for member in [*members, *joined] if not member.acked_by]
    if not unacked:
        for receiver in sorted(thread.told.keys() - thread.acked):
            yield _notice(thread, receiver, "acked", thread.incidents)
        return
    if all(past.silenced(member.labels, now_unix_s) for member in unacked):
        return
    names = [*thread.incidents, *(subject.id for subject in joined)]
    for receiver in route.receivers:
        if receiver not in thread.told:
            yield _notice(thread, receiver, "opened", names)
    if now_unix_s >= thread.grown_unix_s + route.again_s:
        for receiver in sorted(thread.told):
            if set(names) - thread.told[receiver]:
                yield _notice(thread, receiver, "grown", names)
    yield from _escalated(now_unix_s, route, thread, names)


def _escalated(now_unix_s: float, route: Route, thread: Thread, names: list[str]) -> Iterator[Notice]:
    for level, step in enumerate(route.escalate, 1):
        late = now_unix_s >= thread.opened_unix_s + step.after_s
        for receiver in step.receivers if late else ():
            if receiver not in thread.told:
                yield _notice(thread, receiver, "opened", names, level)


def _ended(thread: Thread) -> Iterator[Notice]:
    for receiver in sorted(thread.told.keys() - thread.closed):
        yield _notice(thread, receiver, "closed", thread.incidents)


def _notice(thread: Thread, receiver: str, event: str, incidents: list[str], escalation: int = 0) -> Notice:
    return Notice(
        thread=thread.id,
        route=thread.route,
        receiver=receiver,
        event=event,
        incidents=list(incidents),
        escalation=escalation,
    )
