"""Text from outside, made harmless: for a terminal, for Markdown, for HTML."""

import html
import re
from urllib.parse import quote

from gridctl.visible import visible

_MARKDOWN = re.compile(r"([\\`*\[\]<|~&$]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z]))")
#: What begins a heading, a quotation or a list, where a text begins with it.
_BEGIN = re.compile(r"^( *)([>#]|[-+=](?=[-+= ]|$))")
_NUMBER = re.compile(r"^( *\d{1,9})([.)])(?= |$)")
#: What GitHub and others make a link of without being asked.
_AUTOLINK = re.compile(r"(?i)(?<=www)\.|:(?=//)")


def markdown(text: str) -> str:
    """The text in a paragraph, a list or a cell of a table."""
    shown = _MARKDOWN.sub(r"\\\1", visible(text))
    shown = _NUMBER.sub(r"\1\\\2", _BEGIN.sub(r"\1\\\2", shown))
    return _AUTOLINK.sub(lambda found: f"&#{ord(found[0])};", shown)


def code(text: str) -> str:
    """The text as a span of code."""
    shown = visible(text)
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    blank = " " if "`" in shown else ""
    return f"{ticks}{blank}{shown}{blank}{ticks}"


def address(text: str) -> str:
    """The text as an address that a link may have; "" where it is none that is safe to follow."""
    web = text.startswith(("https://", "http://")) and text.isprintable() and " " not in text
    return quote(text, safe="%:/?#[]@!$&'()*+,;=~-._") if web else ""


def fenced(lines: list[str]) -> str:
    """Lines as a block of code that nothing in them ends."""
    shown = [visible(line) for line in lines]
    ticks = max((len(run) for line in shown for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, ticks + 1)
    return "\n".join([f"{fence}text", *shown, fence])


def markup(text: str) -> str:
    """The text in HTML or SVG, also in an attribute."""
    return html.escape(visible(text), quote=True)
