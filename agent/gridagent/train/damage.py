"""Spoils a transfer on purpose, to show that it is found. Agents refuse it unless started to allow it.

Words: `bit` (a bit flips after it was hashed), `moment` and `buffer` (one such part is left out), `rng`
(a foreign random state with matching hashes), `nan` (a NaN with matching hashes), `truncate` (half
of a chunk is missing), `manifest` (a shape is wrong). `hold:PARTY@PHASE` stops the process with SIGSTOP when
it enters a phase, so that a test can kill it right there.
"""

import logging
import os
import signal
import threading
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from gridagent.train.link import Link, LinkError
from gridagent.train.state import Entry

_log = logging.getLogger("gridagent.train")
_ASK_S = 10.0

WORDS = ("bit", "moment", "buffer", "rng", "nan", "truncate", "manifest")


def of_environment(link: Link) -> str:
    """The word in GRIDAGENT_DAMAGE, if this node's agent was started to allow it; else "", with a warning."""
    word = os.environ.get("GRIDAGENT_DAMAGE", "")
    if word:
        try:
            link.ask("damage", {}, _ASK_S)
        except LinkError as error:
            _log.warning("GRIDAGENT_DAMAGE=%s is not heeded: %s", ascii(word), error)
            return ""
    return word


class Damage:
    """What is to be spoiled in one transfer; the empty word spoils nothing."""

    def __init__(self, word: str) -> None:
        self._word, _, self._holds = word.partition("hold:")
        self._word = self._word.rstrip(",")
        if self._word and self._word.split("=")[0] not in WORDS:
            raise ValueError(f"unknown damage {word!r}; one of {', '.join(WORDS)}, or hold:PARTY@PHASE")
        self._word, _, number = self._word.partition("=")
        self._at_chunk = int(number or 0)  #: which chunk, for bit and truncate
        self._chunk = 0

    def hold(self, party: str, phase: str) -> None:
        """Stops this process if it was to be held here; it goes on when somebody continues it."""
        if self._holds == f"{party}@{phase}":
            # To this very thread: sent to the process, it would let this thread run on for a moment.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    def entries(self, entries: list[Entry]) -> list[Entry]:
        """What is streamed in the place of the true state."""
        if self._word == "rng":
            foreign = torch.Generator().manual_seed(666).get_state()
            return [replace(e, data=foreign) if e.name == "rng/torch" else e for e in entries]
        if self._word == "nan":
            index = _first(entries, lambda e: e.category == "parameters")
            spoiled = _tensor(entries[index]).clone()
            spoiled.view(-1)[0] = float("nan")
            return [*entries[:index], replace(entries[index], data=spoiled), *entries[index + 1 :]]
        if self._word in ("moment", "buffer"):
            wanted = "optimizer" if self._word == "moment" else "buffers"
            index = _first(
                entries, lambda e: e.category == wanted and isinstance(e.data, Tensor) and e.data.dim() > 0
            )
            return entries[:index] + entries[index + 1 :]
        return entries

    def sending(self, where: str, value: Any) -> Any:
        """What goes on the wire in the place of `value`; see `transfer.send_state`."""
        if where == "manifest" and self._word == "manifest":
            index = next(i for i, entry in enumerate(value) if entry.category == "parameters")
            wrong = msgspec.structs.replace(value[index], shape=(*value[index].shape, 1))
            return [*value[:index], wrong, *value[index + 1 :]]
        if where == "chunk":
            self._chunk += 1
            if self._chunk - 1 == self._at_chunk and self._word == "bit":
                spoiled = bytearray().join(value)
                spoiled[len(spoiled) // 2] ^= 1
                return [spoiled]
            if self._chunk - 1 == self._at_chunk and self._word == "truncate":
                whole = bytearray().join(value)
                return [whole[: len(whole) // 2]]
        return value


def _first(entries: list[Entry], wanted: Any) -> int:
    for index, entry in enumerate(entries):
        if wanted(entry):
            return index
    raise ValueError("this job has no such part to spoil")


def _tensor(entry: Entry) -> Tensor:
    assert isinstance(entry.data, Tensor)
    return entry.data
