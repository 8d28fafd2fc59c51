"""Which command lines a spare can run in its own process, in the place of the rank's interpreter."""

from collections.abc import Sequence

#: Options of the interpreter that change nothing that is computed: no buffering, no .pyc files, no greeting.
_IDLE = ("-u", "-B", "-q")


def script_of(argv: Sequence[str]) -> list[str]:
    """SCRIPT or -m MODULE with its arguments, of `python ...`; [] for any other command line."""
    words = list(argv[1:])
    while words and words[0] in _IDLE:
        del words[0]
    module = words[:1] == ["-m"] and len(words) > 1
    return words if module or (words and not words[0].startswith("-")) else []
