"""The text of a material, read in pieces: its lines, and whether it holds a word at all.

Every look begins anew at the first piece, so that no layer holds more than what it makes of the lines. A
word is looked for in a piece before it is looked for in the piece's lines: most pieces hold none.
"""

from collections.abc import Iterator

from gridagent.signals.lines import LINE_CHARS_MAX
from gridctl.model.diagnosis import Material


def lines_of(text: str) -> Iterator[str]:
    """The lines of a text, each at most LINE_CHARS_MAX long, without a copy of the whole."""
    begin = int(text.startswith("\ufeff"))
    while begin < len(text):
        end = text.find("\n", begin)
        end = len(text) if end < 0 else end
        yield text[begin : min(end, begin + LINE_CHARS_MAX)].rstrip("\r")
        begin = end + 1


def pieces_of(material: Material) -> Iterator[str]:
    """The pieces of a material's text, without a byte order mark."""
    pieces = material.pieces()
    first = next(pieces, "").removeprefix("\ufeff")
    if first:
        yield first
    yield from pieces


def uncut_lines_of(material: Material) -> Iterator[str]:
    """The lines of a material, however long."""
    for piece in pieces_of(material):
        yield from lines_of_piece(piece)


def lines_of_piece(piece: str) -> list[str]:
    """The lines of one piece, however long."""
    lines = piece.split("\n")
    if not lines[-1]:
        lines.pop()
    return lines


def all_lines(material: Material) -> Iterator[str]:
    """The lines of a material, each at most LINE_CHARS_MAX long."""
    for line in uncut_lines_of(material):
        yield line[:LINE_CHARS_MAX].rstrip("\r")


def lines_with(material: Material, *words: str) -> Iterator[str]:
    """The lines of a material that hold one of the words."""
    for piece in pieces_of(material):
        inside = [word for word in words if word in piece]
        if inside:
            for uncut in lines_of_piece(piece):
                for word in inside:
                    if word in uncut:
                        line = uncut[:LINE_CHARS_MAX].rstrip("\r")
                        if len(uncut) <= LINE_CHARS_MAX or any(word in line for word in inside):
                            yield line
                        break


def holds(material: Material, *words: str) -> bool:
    """Does a material hold one of the words?"""
    return any(word in piece for piece in material.pieces() for word in words)


def mentions(text: str, roots: str) -> bool:
    """Does a text hold one of the roots (separated by blanks; the first letter in either case)?

    A cheap look before records are taken apart: most layers have no business with most materials.
    """
    for root in roots.split():
        spellings = (root[1:], root.upper()) if len(root) > 4 else (root, root.title(), root.upper())
        if any(spelling in text for spelling in spellings):
            return True
    return False
