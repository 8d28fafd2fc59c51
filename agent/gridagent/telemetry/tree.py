"""Reads small files of /sys and /proc below a root directory; what cannot be read is told once."""

import errno
import os
import re
from pathlib import Path

from gridagent.telemetry import Reading

#: A file of /sys has at most a page; those of /proc that are read here are small too.
BYTES_MAX = 64 << 10
#: So many files that cannot be read are told of one by one.
TROUBLES_MAX = 20
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENXIO, errno.ELOOP}
#: How drivers say "I have no value (now)": an interface that is down has no speed, a slot no sensor.
_NO_VALUE = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENODATA, errno.EAGAIN, errno.EBUSY, errno.EISDIR}
#: What the kernel prints of 64 bits. More digits are no number of its, and a part of them another number.
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")


def sample(device: str, values: dict[str, float | None], **about: object) -> Reading:
    """A record of one device's metrics; `about` are further fields, for people."""
    return Reading("sample", {"device": printable(device), "v": values, **about})


def note(source: str, state: str, text: str, **about: object) -> Reading:
    """What a source has to say about itself. `state` is a stable word, the text is for people."""
    named = {key: printable(value) if isinstance(value, str) else value for key, value in about.items()}
    return Reading(
        "note", {"source": source, "state": state, "text": printable(f"{source}: {text}"), **named}
    )


def printable(name: str) -> str:
    """The name of a file or device as UTF-8 can hold it: the kernel allows any bytes in it."""
    return name.encode(errors="backslashreplace").decode()


class Tree:
    """The files below `root`, named without a leading slash. A call may block as long as the kernel does."""

    def __init__(self, root: Path | str, source: str) -> None:
        self.root, self.source = Path(root), source
        self.reading = ""  #: the file that is being read now
        self._told: set[str] = set()
        self._new: list[Reading] = []

    def text(self, name: str) -> str | None:
        """The file's text without the white space around it, None where there is no such file or no value."""
        self.reading = name
        try:
            descriptor = os.open(self.root / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return os.read(descriptor, BYTES_MAX).decode(errors="replace").strip()
            finally:
                os.close(descriptor)
        except OSError as error:
            self.trouble(name, error)
            return None

    def number(self, name: str, scale: float = 1) -> float | None:
        """The file's integer times `scale`, None where there is none. 64 bits stay exact at scale 1."""
        text = self.text(name)
        return int(text) * scale if text and _INTEGER.fullmatch(text) else None

    def count(self, name: str, scale: float = 1) -> float | None:
        """As `number`, of what nothing can be less than none of."""
        value = self.number(name, scale)
        return None if value is None or value < 0 else value

    def names(self, folder: str, prefix: str = "") -> list[str]:
        """The names in a folder that begin with `prefix`, in order; none where there is no such folder."""
        self.reading = folder
        try:
            return sorted(name for name in os.listdir(self.root / folder) if name.startswith(prefix))
        except OSError as error:
            self.trouble(folder, error)
            return []

    def has(self, name: str) -> bool:
        """Is there such a file or folder?"""
        self.reading = name
        return os.path.lexists(self.root / name)

    def target(self, link: str) -> str:
        """The last part of where a link leads, "" if it is none: the stable name of a numbered thing."""
        self.reading = link
        try:
            return os.path.basename(os.readlink(self.root / link))
        except OSError:
            return ""

    def trouble(self, name: str, error: OSError) -> None:
        """Remembers that a file is there and cannot be read, once for each file."""
        if error.errno in _ABSENT or error.errno in _NO_VALUE:
            return
        if name in self._told or len(self._told) > TROUBLES_MAX:
            return
        self._told.add(name)
        what = f"/{name} cannot be read: {error.strerror}; its values are unknown"
        if len(self._told) > TROUBLES_MAX:
            what = f"more than {TROUBLES_MAX} files cannot be read; further ones are not told of"
        self._new.append(note(self.source, "unreadable", what, path=f"/{name}", errno=error.errno))

    def troubles(self) -> list[Reading]:
        """What could not be read since the last call and was not told of yet."""
        new, self._new = self._new, []
        return new
