"""Takes secrets out of what leaves the node. Pure, and linear in its input: the text may be hostile.

By name, since a value cannot be told from any other: what an option, a variable or a member is set to
whose name holds one of `SECRET_NAMES` is replaced. Besides, logins in URLs, private keys, what stands in an
Authorization header, and tokens whose issuer has given them a form. It rather takes too much than too little.
"""

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

SECRET_NAMES = ("*KEY*", "*TOKEN*", "*SECRET*", "*PASS*", "*CRED*", "*AUTH*")
GONE = "[redacted]"

_BLOCK_CHARS = 1 << 16
#: A value that is longer may be cut in two, where a line is longer than a block.
_VALUE_CHARS = 1 << 12
#: A private key that was told line by line has no more.
_KEY_LINES_MAX = 512

_WORD = "|".join([*(name.strip("*") for name in SECRET_NAMES), "SIGNATURE"])
_QUOTED = r'"(?:[^"\\\n]|\\.)*"?' + r"|'[^'\n]*'?"
#: Between commas stands more of the value, unless a space, a quote or another name follows.
_BARE = r"""[^\s,;&"'\\]|[,;&](?![\s"']|[\w.-]{1,40}["']?[=:])|\\[^\s"']"""
_VALUE = rf"""\\"[^"\n]*"?|(?:{_QUOTED})(?:[^\s,;&"'\\}}\])]|{_QUOTED})*|(?:{_BARE})(?:{_BARE}|{_QUOTED})*"""
_REST = r"[\w.-]{0,40}"
#: A value may stand on the next line, if that is indented.
_GAP = r"[ \t]{0,8}(?:\\?\r?\n[ \t]{1,40})?"
#: NAME=value, NAME: value, "name": "value". The bounds keep it linear.
_SET = re.compile(
    rf"""((?:{_WORD}){_REST}\\?["']?[ \t]{{0,8}}(?:=>|:=|=|:(?!/)){_GAP})"""
    rf"(?:(?:Bearer|Basic)[ \t]+)?(?:{_VALUE})",
    re.IGNORECASE,
)
#: --name value
_OPTION = re.compile(
    rf"(?<![\w-])(--?[\w-]{{0,40}}?(?:{_WORD}){_REST}[ \t]+)(?!--|\[)(?:{_VALUE})", re.IGNORECASE
)
#: A header's value has several words; some schemes have quotes in it.
_HEADER = re.compile(
    r"""(authorization\\?["']?[ \t]{0,8}[:=][ \t]{0,8})"""
    r"""(?:(?:Digest|AWS4[\w-]{0,40}|OAuth|Hawk|Signature)[ \t][^\n]*|\\?["'][^"'\n]*|[^\s"'][^"'\n]*)""",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b((?:Bearer|Basic)[ \t]+)[\w.~+/=-]{8,}", re.IGNORECASE)
#: What stands before the last @, also where it is a token alone, or a password with signs of a path in it.
_LOGIN = re.compile(
    r"""(://)(?:[^\s"'<>/:@]{0,256}:(?!\d{1,5}(?![^\s/"']))(?:(?!://)[^\s"'<>]){0,256}|[^\s"'<>/]{0,512})@"""
)
#: AWS, GitHub, Hugging Face, GitLab, Slack, OpenAI and the like, JSON web tokens.
_FORMED = re.compile(
    r"\b(?:(?:AKIA|ASIA)[0-9A-Z]{16}|(?:gh[pousr]|hf)_[A-Za-z0-9]{20,}|(?:github_pat_|glpat-|nvapi-|xox[abeoprs]-)"
    r"[\w-]{20,}|sk-(?:proj-|ant-)?[A-Za-z0-9_]{20,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,})"
)
_BEGIN = re.compile(r"-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY(?: BLOCK)?-----")
_END = re.compile(r"-----END [A-Z0-9 ]{0,30}PRIVATE KEY")
_PRIVATE = re.compile(rf"({_BEGIN.pattern})(?:(?!-----END).){{0,16384}}", re.DOTALL)
_OF_A_KEY = re.compile(r"[A-Za-z0-9+/]{20,}={0,2}")
_CUT = re.compile(rf"{_WORD}|://|Bearer|Basic", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether a name (of a variable, an option, a member) looks like a secret's."""
    return any(fnmatchcase(name.upper(), pattern) for pattern in SECRET_NAMES)


def redacted_text(text: str) -> str:
    """The text without values of secrets, logins in URLs and private keys."""
    text = _PRIVATE.sub(rf"\1{GONE}", _without_torn_key(text))
    return "".join(_of_lines(block) for block in _blocks(text))


def _without_torn_key(text: str) -> str:
    """The text without the rest of a private key whose begin was cut off."""
    end, begin = _END.search(text), _BEGIN.search(text)
    if end is None or (begin is not None and begin.start() < end.start()):
        return text
    lines = text[: end.start()].split("\n")
    first = len(lines) - 1
    while first and len(lines) - first < _KEY_LINES_MAX and _is_of_a_key(lines[first - 1]):
        first -= 1
    return "\n".join([*lines[:first], GONE, lines[-1] + text[end.start() :]])


def _is_of_a_key(line: str) -> bool:
    """Whether a line may be one of a private key, whatever a log has put before it."""
    words = line.split()[-1:]
    return bool(words and (_OF_A_KEY.fullmatch(words[0]) or words == [line.strip()]))


class KeyLines:
    """Takes private keys out that come line by line, each a text of its own."""

    def __init__(self) -> None:
        self._left = 0  #: so many lines may still be the key's

    def redacted(self, line: str) -> str:
        """The line, or what is left of it within a key."""
        if begin := _BEGIN.search(line):
            self._left = 0 if _END.search(line, begin.end()) else _KEY_LINES_MAX
        elif self._left:
            self._left = 0 if _END.search(line) else self._left - 1
            if self._left and _is_of_a_key(line):
                return GONE
        return line


def _blocks(text: str) -> Iterator[str]:
    """Whole lines, not too many: one search holds all other threads up until it ends."""
    start = 0
    while start < len(text):
        end = start + _BLOCK_CHARS
        if end < len(text):
            line = text.rfind("\n", start, end) + 1
            while line and text[line] in " \t":  # it may be the value of the line before
                line = text.rfind("\n", start, line - 1) + 1
            names = _CUT.search(text, max(start + 1, end - _VALUE_CHARS), end + 16)
            end = line or (names.start() if names else end)
        yield text[start:end]
        start = end


def _of_lines(text: str) -> str:
    text = _HEADER.sub(rf"\1{GONE}", text)
    text = _SET.sub(rf"\1{GONE}", text)
    text = _OPTION.sub(rf"\1{GONE}", text)
    text = _BEARER.sub(rf"\1{GONE}", text)
    text = _LOGIN.sub(rf"\1{GONE}@", text)
    return _FORMED.sub(GONE, text)


def redacted_argv(argv: Sequence[str]) -> list[str]:
    """A command line: also the word after an option that looks like a secret's."""
    found: list[str] = []
    hide = False
    for word in argv:
        name, sets, _ = word.partition("=")
        option = word.startswith("-")
        if hide and not word.startswith("--"):
            found.append(GONE)
        elif sets and " " not in name and is_secret(name):
            found.append(f"{name}={GONE}")
        else:
            found.append(redacted_text(word))
        hide = option and not sets and is_secret(word)
    return found


def redacted(value: Any) -> Any:
    """A value of builtins: members with a secret's name are replaced whole, unless they are numbers; texts
    are searched."""
    if isinstance(value, dict):
        return {
            key: GONE
            if is_secret(str(key)) and isinstance(item, str | list | tuple | dict)
            else redacted(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redacted(item) for item in value]
    return redacted_text(value) if isinstance(value, str) else value
