"""What a script reads through `session.batches`, and how a process that takes a rank over goes on in it.

Such a process opens its loaders anew on the state that came. That this gives the very batch that reading on
would have given, and leaves the random states as that would have left them, is up to the loader's own code:
many draw a seed when they are opened, some only as the first batch is fetched, and a state_dict may miss
something. So a spare tries it once it is warm: it reads on by one batch, opens the loader anew where that
began, reads again, and compares.
"""

from collections.abc import Iterator
from typing import Any

from gridagent.train.batch import Opaque, contents
from gridagent.train.rng import Rng, scramble
from gridagent.train.state import Entry, RankState, received_tree, tree_entries

_END = object()


class Feed:
    """One loader that is read."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._iterator: Iterator[Any] = iter(loader)
        self._fetched: list[Any] = []  #: the next batch, where it was fetched already
        self.draws_late = False  #: opening it draws random numbers only as the first batch is fetched

    def next(self) -> Any:
        """The next batch. Raises `StopIteration`."""
        batch = self._fetched.pop() if self._fetched else next(self._iterator, _END)
        if batch is _END:
            raise StopIteration
        return batch

    def reopen(self) -> None:
        """A new iterator on the loader's present state. It may draw random numbers."""
        self._iterator = iter(self.loader)
        self._fetched = [next(self._iterator, _END)] if self.draws_late else []


class Feeds:
    """All that a script reads through `session.batches`."""

    def __init__(self, state: RankState) -> None:
        self._state = state
        self._open: list[Feed] = []
        self._read: set[str] = set()  #: names of the registered loaders among them
        self.used = False
        self.strange = ""  #: the kind of something that was read and is not registered
        self.trouble: list[tuple[str, str, bool]] = []  #: (code, text, fatal): what a rehearsal has found

    def open(self, loader: Any) -> Feed:
        """The script begins to read `loader`."""
        self.used = True
        if name := self._name(loader):
            self._read.add(name)
        else:
            self.strange = type(loader).__name__
        feed = Feed(loader)
        self._open.append(feed)
        return feed

    def close(self, feed: Feed) -> None:
        """The script has ended reading."""
        self._open.remove(feed)

    def reopen(self) -> None:
        """Opens all that is read anew; before the random states are restored, for it may draw from them."""
        for feed in self._open:
            feed.reopen()

    def blockers(self) -> list[tuple[str, str, bool]]:
        """(code, text, fatal) for what forbids a swap, or bit identity."""
        found = list(self.trouble)
        if self.strange:
            text = (
                f"session.batches() reads something of the kind {self.strange} that is not registered,"
                " so a new process would read something else: give Session and batches() the same loader, and"
                " change its batches within the loop or within the loader"
            )
            found.append(("unregistered-loader", text, True))
        for name, loader in self._state.loaders.items():
            if name not in self._read and hasattr(loader, "__iter__"):
                text = (
                    f"{name} is registered but not read through session.batches(): where the script holds an"
                    " iterator of it, a new process goes on elsewhere"
                )
                found.append(("loader-beside", text, False))
        return found

    def rehearse(self) -> bool:
        """Tries whether each loader that is read goes on alike when it is opened anew; notes what it finds.

        For a spare that is warm: afterwards nothing of its loaders and random states counts any more. False
        where a loader came to its end instead: a step later it may tell more.
        """
        self.trouble = []
        told = True
        for feed in list(self._open):
            if name := self._name(feed.loader):
                try:
                    told &= self._rehearse(name, feed)
                except Exception as error:  # of the loader's own code
                    text = f"{name} cannot be opened anew: {type(error).__name__}: {error}"
                    self.trouble.append(("loader-reopened", text, True))
        return told

    def _rehearse(self, name: str, feed: Feed) -> bool:
        begin = _Begin(name, feed.loader, self._state)
        try:
            went_on = begin.read_on(feed)
            feed.draws_late = False
            if not begin.reads_alike(feed):
                feed.draws_late = True
                if not begin.reads_alike(feed):
                    self._note(name, "gives another batch, or draws other random numbers,")
        except Opaque as error:
            self._note(name, f"gives batches that nobody can compare ({error})")
            return True
        return went_on

    def _note(self, name: str, does: str) -> None:
        text = (
            f"{name}, opened anew on its own state_dict, {does} than if it is read on: later losses would"
            " differ. Its state_dict must say all that decides its next batch, and the batch must not"
            " depend on random numbers that are drawn when it is opened"
        )
        self.trouble.append(("loader-reopened", text, False))

    def _name(self, loader: Any) -> str:
        return next((name for name, its in self._state.loaders.items() if its is loader), "")


class _Begin:
    """Where a rehearsal begins: the state of a loader and of all generators, and what reading on gave."""

    def __init__(self, name: str, loader: Any, state: RankState) -> None:
        self._name = name
        self._generators = state.generators
        self._parts = {e.name: _copy(e) for e in tree_entries(name, "other", loader.state_dict())}
        self._rng = Rng.read(self._generators)
        self._batch: list[Any] = []
        self._after = self._rng

    def read_on(self, feed: Feed) -> bool:
        """Fetches the next batch; False at the loader's end. Raises `Opaque`."""
        self._batch, went_on = self._fetch(feed)
        self._after = Rng.read(self._generators)
        return went_on

    def reads_alike(self, feed: Feed) -> bool:
        """Does the loader, opened anew, give the same batch and leave the same random states?"""
        scramble(self._generators)
        parts = {name: _copy(entry) for name, entry in self._parts.items()}
        feed.loader.load_state_dict(received_tree(self._name, parts))
        feed.reopen()
        self._rng.put_back()
        batch, _ = self._fetch(feed)
        return batch == self._batch and Rng.read(self._generators).same(self._after)

    def _fetch(self, feed: Feed) -> tuple[list[Any], bool]:
        try:
            return contents(feed.next()), True
        except StopIteration:
            return [], False


def _copy(entry: Entry) -> Entry:
    data = entry.data if isinstance(entry.data, bytes) else entry.data.clone()
    return Entry(entry.name, entry.category, data)
