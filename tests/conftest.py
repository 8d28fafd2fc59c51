"""What holds for every test: none is judged by the speed of the machine; what is left out says so."""

import os
import shutil

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("gridctl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gridctl")

#: Files of tests -> programs that they need and a fresh machine lacks. In CI a missing one is a failure.
NEEDED = {
    "test_trust_keyring.py": ("gnome-keyring-daemon", "dbus-daemon", "dbus-send"),
    "test_agent_nvml.py": ("gcc",),
    "test_agent_nvml_serve.py": ("gcc",),
    "test_agent_amdsmi.py": ("gcc",),
}
#: Debian's packages that bring them.
PACKAGES = {"gcc": "gcc libc6-dev", "gnome-keyring-daemon": "gnome-keyring"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("CI"):
        return
    for item in items:
        missing = [name for name in NEEDED.get(item.path.name, ()) if shutil.which(name) is None]
        if missing:
            packages = sorted({PACKAGES.get(name, "dbus") for name in missing})
            reason = f"{', '.join(missing)} missing: apt-get install {' '.join(packages)}"
            item.add_marker(pytest.mark.skip(reason=reason))
