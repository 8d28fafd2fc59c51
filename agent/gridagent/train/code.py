"""Which code this process runs, as two digests: what two processes must have in common beside the state.

A digest is over contents and module names, so it is the same wherever the files lie.
"""

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

#: Of whom only the version counts, or nothing: gridagent has its own digest, torch generates modules, and
#: `__mp_main__` is whatever started this process.
_NOT_THE_SCRIPTS = sys.stdlib_module_names | {"gridagent", "torch", "__mp_main__"}
_STDLIB = Path(os.__file__).parent


def _digest(contents: Iterable[tuple[str, bytes]]) -> str:
    whole = hashlib.sha256()
    for name, content in sorted(contents):
        whole.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    return whole.hexdigest()[:16]


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _agent_code() -> str:
    here = Path(__file__).parent
    paths = [*here.glob("*.py"), here.parent / "wire.py", here.parent / "framing.py"]
    return _digest((path.name, _content(path)) for path in paths)


#: What two processes of one hand-over say to each other: gridagent.train and its messages, as they were when
#: this process imported them. An installation that is changed later does not change a process that runs.
AGENT_CODE = _agent_code()


def script_digest(folder: str) -> str:
    """Over the script and what it has imported, but for the standard library and what is installed.

    `folder` is where a relative path of the script starts. What cannot be read counts as empty.
    """
    paths = {name: path for name, module in list(sys.modules.items()) if (path := _source(name, module))}
    return _digest((name, _content(Path(folder, path))) for name, path in paths.items())


def _source(name: str, module: ModuleType) -> str:
    """The file of a module that belongs to the script, else ""."""
    if name.partition(".")[0] in _NOT_THE_SCRIPTS:
        return ""
    file = None
    with contextlib.suppress(Exception):  # a module may be any object, and answer with anything
        file = module.__file__
    if not isinstance(file, str):
        return ""
    path = Path(file)
    installed = {"site-packages", "dist-packages"} & set(path.parts) or path.is_relative_to(_STDLIB)
    return file if name == "__main__" or (path.suffix == ".py" and not installed) else ""
