"""Where the ranks' processes are now: Python frames by py-spy, and what the kernel says of each thread."""

import contextlib
import os
from pathlib import Path

from gridagent.evidence.tools import find, run
from gridagent.redact import redacted_argv, redacted_text

THREADS_MAX = 512
FILE_BYTES_MAX = 16 << 10
PY_SPY_S = 15.0
#: Of each thread; `stack` only for who may see the kernel's own frames.
FILES = ("comm", "wchan", "syscall", "stack")


def of_process(pid: int, folder: str, bytes_max: int, seconds: float) -> tuple[bytes, str]:
    """The stacks of a process and what is missing of them. Raises `OSError` if it has ended."""
    process = Path("/proc") / str(pid)
    words = process.joinpath("cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    parts = [f"process {pid}: {' '.join(redacted_argv(words))}\n", _read(process / "status")]
    python, missing = _python(pid, folder, bytes_max // 2, min(PY_SPY_S, seconds))
    parts += ["\n== Python\n", python or f"none: {missing}\n", "\n== threads, as the kernel has them\n"]
    threads = sorted(os.listdir(process / "task"), key=int)
    for thread in threads[:THREADS_MAX]:
        parts.append(f"-- thread {thread}\n")
        for name in FILES:
            text = _read(process / "task" / thread / name)
            parts.append(f"{name}: {text.rstrip()}\n" if text else "")
    if len(threads) > THREADS_MAX:
        missing = f"{missing}; cut after {THREADS_MAX} of {len(threads)} threads".lstrip("; ")
    return "".join(parts).encode()[:bytes_max], missing


def _python(pid: int, folder: str, bytes_max: int, seconds: float) -> tuple[str, str]:
    """The Python frames. The process is not stopped for it: a py-spy that is killed would leave it so."""
    program = find("py-spy")
    if program is None:
        return "", "py-spy is not installed on this node: pip install py-spy"
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    data, wrong = run(command, folder, bytes_max, seconds)
    text = redacted_text(data.decode(errors="replace"))
    return ("", f"{wrong}: {text.strip()[:400]}") if wrong else (text, "")


def _read(path: Path) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(FILE_BYTES_MAX).decode(errors="replace")
    return ""
