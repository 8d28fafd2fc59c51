"""A real Secret Service (gnome-keyring-daemon) on a private D-Bus, with a private home.

Nothing of the user's session is seen or touched. Where the programs are missing this fails and says
how to install them: a test of the keyring that skips itself would prove nothing.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PASSWORD = b"a login password"
_PROGRAMS = ("dbus-daemon", "dbus-send", "gnome-keyring-daemon")
# No <servicedir>: nothing is started by the bus itself, so every process is ours to end.
_BUS = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig><type>session</type><listen>unix:path={socket}</listen><auth>EXTERNAL</auth>
<policy context="default"><allow send_destination="*" eavesdrop="true"/><allow eavesdrop="true"/>
<allow own="*"/></policy>
</busconfig>"""


def require() -> None:
    """Fails with the way to install what is missing."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    assert not missing, (
        f"{missing} not installed: run `apt-get update && apt-get install -y gnome-keyring dbus`"
    )


@contextmanager
def secret_service() -> Iterator[dict[str, str]]:
    """Runs one, unlocked. Gives the environment in which a program finds it."""
    require()
    folder = Path(tempfile.mkdtemp(prefix="g"))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        (folder / "bus.conf").write_text(_BUS.format(socket=folder / "bus"))
        environment = clean_environment(folder)
        environment["DBUS_SESSION_BUS_ADDRESS"] = f"unix:path={folder / 'bus'}"
        bus = subprocess.Popen(
            ["dbus-daemon", f"--config-file={folder / 'bus.conf'}", "--nofork", "--print-address"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        processes.append(bus)
        assert bus.stdout is not None
        assert bus.stdout.readline(), "dbus-daemon did not start"  # it prints once it listens
        keyring = subprocess.Popen(
            ["gnome-keyring-daemon", "--unlock", "--foreground", "--components=secrets"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        processes.append(keyring)
        assert keyring.stdin is not None
        keyring.stdin.write(PASSWORD)
        keyring.stdin.close()  # the end of the password
        _wait_for_service(environment, keyring)
        yield environment
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for_service(environment: dict[str, str], keyring: subprocess.Popen[bytes]) -> None:
    call = ["dbus-send", "--session", "--print-reply", "--dest=org.freedesktop.secrets"]
    call += ["/org/freedesktop/secrets/aliases/default", "org.freedesktop.DBus.Introspectable.Introspect"]
    deadline = time.monotonic() + 60
    while subprocess.run(call, env=environment, capture_output=True, timeout=60).returncode != 0:
        assert keyring.poll() is None, "gnome-keyring-daemon ended"
        assert time.monotonic() < deadline, "gnome-keyring-daemon offers no Secret Service"
        time.sleep(0.05)


def clean_environment(folder: Path) -> dict[str, str]:
    """An environment with a home of its own and no keyring, whatever the user's session has."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DBUS_", "XDG_", "GNOME_", "KDE_", "PYTHON_KEYRING"))
    }
    return kept | {
        "HOME": str(folder),
        "XDG_DATA_HOME": str(folder / "data"),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "XDG_RUNTIME_DIR": str(folder),
    }
