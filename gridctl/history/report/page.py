"""A document as one HTML file that opens offline: no script, no font and no picture from anywhere. Pure."""

import pkgutil
from collections.abc import Iterator, Sequence
from functools import cache

from gridctl.history.report.document import Block, Document, Figure, Items, Links, Raw, Table, Text
from gridctl.history.report.escape import address, markup
from gridctl.history.report.plot import legend, svg


def write(document: Document) -> str:
    """The file's text."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{markup(document.title)}</title>",
        f"<style>\n{_style()}</style>",
        "</head>",
        "<body>",
        f"<h1>{markup(document.title)}</h1>",
    ]
    for section in document.sections:
        parts.append(f"<section><h2>{markup(section.title)}</h2>")
        parts += [_block(block) for block in section.blocks]
        parts.append("</section>")
    return "\n".join([*parts, "</body>", "</html>"]) + "\n"


@cache
def _style() -> str:
    style = pkgutil.get_data(__package__, "page.css")
    assert style is not None, "page.css is a part of this package"
    return style.decode()


def _block(block: Block) -> str:
    match block:
        case Text(text):
            return f"<p>{markup(text)}</p>"
        case Items(items):
            return f"<ul>{''.join(_item(text, command) for text, command in items)}</ul>"
        case Raw(lines):
            return f"<pre>{chr(10).join(map(markup, lines))}</pre>"
        case Links(links):
            return f"<ul>{''.join(_link(text, told) for text, told in links)}</ul>"
        case Table(heads, rows):
            return "\n".join(_table(heads, rows))
        case Figure():
            return _figure(block)


def _item(text: str, command: str) -> str:
    return f"<li>{markup(text)}{f': <code>{markup(command)}</code>' if command else ''}</li>"


def _link(text: str, told: str) -> str:
    safe = address(told)
    shown = f'<a rel="noreferrer noopener" href="{markup(safe)}">{markup(told)}</a>' if safe else markup(told)
    return f"<li>{markup(text)}: {shown}</li>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "<table>"
    if heads:
        cells = "".join(f'<th scope="col">{markup(head)}</th>' for head in heads)
        yield f"<thead><tr>{cells}</tr></thead>"
    yield "<tbody>"
    for row in rows:
        first, *rest = row
        side = f"<td>{markup(first)}</td>" if heads else f'<th scope="row">{markup(first)}</th>'
        yield f"<tr>{side}{''.join(f'<td>{markup(text)}</td>' for text in rest)}</tr>"
    yield "</tbody></table>"


def _figure(figure: Figure) -> str:
    plot = figure.plot
    unit = f" ({plot.unit})" if plot.unit else ""
    if plot.missing:
        return f"<figure><figcaption>{markup(plot.title)}</figcaption><p>{markup(plot.missing)}</p></figure>"
    caption = f"<figcaption>{markup(plot.title + unit)}</figcaption>"
    return f"<figure>{caption}\n{svg(figure)}\n{legend(plot)}</figure>"
