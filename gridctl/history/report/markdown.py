"""A document as Markdown (CommonMark with tables). It has no plots, and says where they are. Pure."""

from gridctl.history.report.document import Block, Document, Figure, Items, Links, Raw, Table, Text
from gridctl.history.report.escape import address, code, fenced, markdown


def write(document: Document) -> str:
    """The file's text."""
    parts = [f"# {markdown(document.title)}"]
    for section in document.sections:
        blocks = [_block(block) for block in section.blocks if not isinstance(block, Figure)]
        figures = [block for block in section.blocks if isinstance(block, Figure)]
        parts += [f"## {markdown(section.title)}", *blocks]
        if figures:
            parts.append("\n".join(_figure(figure) for figure in figures))
    return "\n\n".join(parts) + "\n"


def _block(block: Block) -> str:
    match block:
        case Text(text):
            return markdown(text)
        case Items(items):
            return "\n".join(
                f"* {markdown(text)}" + (f": {code(command)}" if command else "") for text, command in items
            )
        case Raw(lines):
            return fenced([*lines])
        case Links(links):
            return "\n".join(f"* {markdown(text)}: {_link(told)}" for text, told in links)
        case Table(heads, rows):
            head = [markdown(text) for text in heads] or [""] * len(rows[0])
            body = [[markdown(text) for text in row] for row in rows]
            table = [head, ["---"] * len(head), *body]
            return "\n".join(f"| {' | '.join(row)} |" for row in table)
        case Figure():
            return _figure(block)


def _link(told: str) -> str:
    safe = address(told)
    return f"<{safe}>" if safe else markdown(told)


def _figure(figure: Figure) -> str:
    plot = figure.plot
    if plot.missing:
        return f"* {markdown(plot.title)}: {markdown(plot.missing)}"
    return (
        f"* {markdown(plot.title)}: {len(plot.series)} lines, which `gridctl incident report -f html` draws"
    )
