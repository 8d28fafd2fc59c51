"""Text from outside, which is shown and never obeyed."""

import unicodedata


def visible(text: str) -> str:
    """Controls, direction marks and line breaks show, and act on nothing."""
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character == " " or unicodedata.category(character)[0] not in "CZ":
        return character
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
