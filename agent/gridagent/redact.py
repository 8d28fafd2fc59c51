"""Takes secrets out of what leaves the node. Pure, and linear in its input: the text may be hostile.

By name, since a value cannot be told from any other: what an option, a variable or a member is set to
whose name holds one of `SECRET_NAMES` is replaced. It rather takes too much than too little.
"""

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

SECRET_NAMES = ("*KEY*", "*TOKEN*", "*SECRET*", "*PASS*", "*CRED*", "*AUTH*")
GONE = "[redacted]"

_BLOCK_CHARS = 1 << 16
_WORD = "|".join(name.strip("*") for name in SECRET_NAMES)
_VALUE = r"""\\?"[^"\n]*"?|'[^'\n]*'?|[^\s,;&"'\\]+"""
_REST = r"[\w.-]{0,40}"
#: NAME=value, NAME: value, "name": "value". The bounds keep it linear.
_SET = re.compile(
    rf"""((?:{_WORD}){_REST}\\?["']?[ \t]{{0,3}}(?:=|:(?!/))[ \t]{{0,3}})"""
    rf"(?:(?:Bearer|Basic)[ \t]+)?(?:{_VALUE})",
    re.IGNORECASE,
)
#: --name value
_OPTION = re.compile(
    rf"(?<![\w-])(--?[\w-]{{0,40}}?(?:{_WORD}){_REST}[ \t]+)(?![-\[])(?:{_VALUE})", re.IGNORECASE
)
_BEARER = re.compile(r"\b((?:Bearer|Basic)[ \t]+)[\w.~+/=-]{8,}", re.IGNORECASE)
_LOGIN = re.compile(r"(://)[^/\s:@\"']{1,256}:[^/\s@\"']{1,256}@")
_PRIVATE = re.compile(r"(-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----)(?:(?!-----END).){0,16384}", re.DOTALL)


def is_secret(name: str) -> bool:
    """Whether a name (of a variable, an option, a member) looks like a secret's."""
    return any(fnmatchcase(name.upper(), pattern) for pattern in SECRET_NAMES)


def redacted_text(text: str) -> str:
    """The text without values of secrets, logins in URLs and private keys."""
    text = _PRIVATE.sub(rf"\1{GONE}", text)
    return "".join(_of_lines(block) for block in _blocks(text))


def _blocks(text: str) -> Iterator[str]:
    """Whole lines, not too many: one search holds all other threads up until it ends."""
    start = 0
    while start < len(text):
        end = text.rfind("\n", start, start + _BLOCK_CHARS) + 1 or start + _BLOCK_CHARS
        yield text[start:end]
        start = end


def _of_lines(text: str) -> str:
    text = _SET.sub(rf"\1{GONE}", text)
    text = _OPTION.sub(rf"\1{GONE}", text)
    text = _BEARER.sub(rf"\1{GONE}", text)
    return _LOGIN.sub(rf"\1{GONE}@", text)


def redacted_argv(argv: Sequence[str]) -> list[str]:
    """A command line: also the word after an option that looks like a secret's."""
    found: list[str] = []
    hide = False
    for word in argv:
        option = word.startswith("-")
        found.append(GONE if hide and not option else redacted_text(word))
        hide = option and "=" not in word and is_secret(word)
    return found


def redacted(value: Any) -> Any:
    """A value of builtins: members with a secret's name are replaced whole, texts are searched."""
    if isinstance(value, dict):
        return {
            key: GONE if is_secret(str(key)) and isinstance(item, str) else redacted(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redacted(item) for item in value]
    return redacted_text(value) if isinstance(value, str) else value
