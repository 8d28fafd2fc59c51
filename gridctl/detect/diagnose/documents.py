"""The JSON values of a material: one a line, or one after the other over several lines.

A value is read whole, so it must not be longer than `WHOLE_CHARS_MAX`; the material around it may be.
"""

import json
import re
from collections.abc import Iterator, Sequence

from gridctl.detect.diagnose.ruling import rule_says
from gridctl.detect.diagnose.texts import mentions, pieces_of, uncut_lines_of
from gridctl.model.diagnosis import WHOLE_CHARS_MAX, Diagnosis, Material

_JSON_BEGIN = re.compile(r"[\ufeff \t]*(?:\{\s*(?:[\"}]|$)|\[\s*(?:[{\[\"\]]|$))")
_BETWEEN = re.compile("[ \t\r\n,\ufeff]*")
_HEAD_CHARS, _HEAD_LINES = 4096, 20


class TooLarge:
    """Stands for a value that is longer than `WHOLE_CHARS_MAX`."""


def looks_like_json(material: Material) -> bool:
    """Does one of the first lines begin like JSON? Others may stand around it."""
    lines = material.head(_HEAD_CHARS).split("\n")
    return any(_JSON_BEGIN.match(line) for line in lines[:_HEAD_LINES])


def documents(material: Material, roots: str = "") -> Iterator[object]:
    """The JSON values of a material, what is none left out; with `roots` only if it mentions one of them."""
    for value, _ in sized_documents(material, roots):
        yield value


def sized_documents(material: Material, roots: str = "") -> Iterator[tuple[object, int]]:
    """The same, each with how many characters it takes."""
    if looks_like_json(material) and (
        not roots or any(mentions(piece, roots) for piece in material.pieces())
    ):
        yield from (pair for pair in _values(material) if not isinstance(pair[0], TooLarge))


def refusals(materials: Sequence[Material]) -> Iterator[Diagnosis]:
    """Layer: what was not read because it cannot be cut."""
    for material in materials:
        if looks_like_json(material) and material.whole() is None:
            large = sum(isinstance(value, TooLarge) for value, _ in _values(material))
            if large:
                limit = f"{WHOLE_CHARS_MAX >> 20} Mi characters"
                what = f"{material.name}: {large} JSON documents of more than {limit}"
                yield rule_says("reading.too-large", [what], event_count=large)


def _values(material: Material) -> Iterator[tuple[object, int]]:
    first = True
    for number, line in enumerate(uncut_lines_of(material)):
        if not _JSON_BEGIN.match(line):
            continue
        value = _parsed(line.strip(" \t\r\ufeff"))
        if value is None and first:
            several = False
            for pair in _concatenated(_from_line(material, number)):
                several = True
                yield pair
            if several:
                return
        first = False
        if value is not None:
            yield value, len(line)


def _parsed(text: str) -> object:
    """The value, or None: for what is no JSON object or array, or nests too deep."""
    if text[:1] not in ("{", "["):
        return None
    if len(text) > WHOLE_CHARS_MAX:
        return TooLarge()
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value


def _from_line(material: Material, number: int) -> Iterator[str]:
    """The pieces of a material from a line on."""
    for piece in pieces_of(material):
        count = piece.count("\n")
        if number > count:
            number -= count
            continue
        if rest := piece.split("\n", number)[number] if number >= 0 else piece:
            yield rest
        number = -1


def _concatenated(pieces: Iterator[str]) -> Iterator[tuple[object, int]]:
    """The values that stand one after the other, until something else does."""
    decoder = json.JSONDecoder()
    text, at = "", 0
    while True:
        between = _BETWEEN.match(text, at)
        at = between.end() if between else at
        if at == len(text):
            text, at = next(pieces, ""), 0
            if not text:
                return
        elif text[at] not in "{[":
            return
        else:
            try:
                value, end = decoder.raw_decode(text, at)
            except RecursionError:
                return
            except ValueError:
                if len(text) - at > WHOLE_CHARS_MAX:
                    yield TooLarge(), len(text) - at
                    return
                text, at = text[at:], 0
                more = _as_much(pieces, min(len(text), WHOLE_CHARS_MAX + 1 - len(text)))
                if not more:
                    return
                text += more
            else:
                yield (value if end - at <= WHOLE_CHARS_MAX else TooLarge()), end - at
                at = end


def _as_much(pieces: Iterator[str], chars: int) -> str:
    """At least as many characters more, as far as there are: what grows twofold is copied twice in all."""
    found: list[str] = []
    for piece in pieces:
        found.append(piece)
        chars -= len(piece)
        if chars <= 0:
            break
    return "".join(found)
