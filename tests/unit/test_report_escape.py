"""Text from outside in a report: it is shown, and acts on nothing."""

import html
import re
from html.parser import HTMLParser

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from gridctl.history.report.document import Document, Items, Raw, Section, Table, Text
from gridctl.history.report.escape import address, fenced, markdown, markup, visible
from gridctl.history.report.markdown import write

SIGNS = "\\`*_{}[]()<>#+-.!|~&$=:/@w1\n\r\t\x1b\u202e\x00 ab"
WORDS = st.one_of(st.text(), st.text(alphabet=SIGNS, max_size=30))
COMMONMARK = MarkdownIt("commonmark").enable(["table", "strikethrough"])


def shown(rendered: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", rendered)).strip()


def flat(text: str) -> str:
    """Renderers do not tell apart how many blanks there are at an end."""
    return visible(text).strip()


@given(WORDS)
@example("www.evil.example and https://evil.example")
@example("-5 1. # x\n---\n> y")
@example("| a | `b` | \\| c")
def test_markdown_shows_a_text_as_it_is(text: str) -> None:
    for before in ("", "* "):
        rendered = COMMONMARK.render(f"{before}x {markdown(text)}")
        assert set(re.findall(r"</?(\w+)", rendered)) <= {"p", "ul", "li"}
        assert shown(rendered).removeprefix("x").strip() == flat(text)
    rendered = COMMONMARK.render(f"* {markdown(text)}")
    assert set(re.findall(r"</?(\w+)", rendered)) <= {"ul", "li"}
    assert "://" not in markdown(text)


@given(WORDS)
def test_a_cell_stays_one_cell(text: str) -> None:
    document = Document("t", [Section("s", [Table(["a", "b"], [[text, "end"], ["x", text]])])])
    cells = re.findall(r"<td>(.*?)</td>", COMMONMARK.render(write(document)), re.DOTALL)
    assert len(cells) == 4
    assert (shown(cells[0]), cells[1]) == (flat(text), "end")


@given(st.lists(WORDS, max_size=4))
@example(["```", "````text", "`````"])
def test_nothing_ends_a_block_of_lines(lines: list[str]) -> None:
    tokens = COMMONMARK.parse(fenced(lines))
    assert [token.type for token in tokens] == ["fence"]
    assert tokens[0].content.splitlines() == [visible(line) for line in lines]


class Read(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(f"<p>{text}</p>")
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


@given(WORDS)
def test_html_shows_a_text_as_it_is(text: str) -> None:
    found = Read(markup(text))
    assert (found.tags, found.text) == (["p"], visible(text))
    assert not set(markup(text)) & set("<>\"'")


@pytest.mark.parametrize(
    "told",
    ["javascript:alert(1)", "data:text/html,x", "//x", "file:///etc/passwd", "https://a b", "", "ftp://x"],
)
def test_only_addresses_of_the_web_are_links(told: str) -> None:
    assert address(told) == ""


@given(WORDS)
def test_an_address_ends_no_link(text: str) -> None:
    assert not set(address(f"https://a.example/{text}")) & set('<>"\\ \n`|')


def test_commands_are_code() -> None:
    document = Document("t", [Section("s", [Items([("do", "x `y` ``z``")]), Text("t"), Raw(["r"])])])
    assert "<code>x `y` ``z``</code>" in COMMONMARK.render(write(document))
