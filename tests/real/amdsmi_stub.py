"""Compiles the stub of AMD SMI (amdsmi_stub.c), and lays out the buses that the source looks at; fixtures."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
from nvml_stub import Stub

#: amdsmi looks up every function of the library as it is imported.
_LOOKED_UP = re.compile(r"_libraries\['libamd_smi\.so'\]\.(\w+)")


class AmdStub(Stub):
    """Also the node's PCI devices: `node` is the root of its files."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.node = root / "node"

    def device(self, gpu: int) -> Path:
        return self.node / f"sys/bus/pci/devices/0000:{0xC1 + 0x10 * gpu:02x}:00.0"

    def bus(self, gpu: int, first: bytes | None) -> None:
        """What a GPU's configuration space begins with; None: the device has gone."""
        config = self.device(gpu) / "config"
        if first is None:
            config.unlink()
            config.parent.rmdir()
            return
        config.parent.mkdir(parents=True, exist_ok=True)
        new = self.node / "new"
        new.write_bytes(first + bytes(60))
        new.rename(config)


def compiled(folder: Path, *, whole: bool = True) -> Path:
    """Not `whole`: the library lacks functions that this release of amdsmi looks up."""
    package = importlib.util.find_spec("amdsmi")
    assert package is not None, "amdsmi is missing: make installs it"
    assert package.origin is not None
    wrapper = Path(package.origin).with_name("amdsmi_wrapper.py").read_text()
    names = sorted(set(_LOOKED_UP.findall(wrapper)))
    rest = folder / "rest.c"
    rest.write_text("".join(f"__attribute__((weak)) int {name}(void) {{ return 2; }}\n" for name in names))
    source = Path(__file__).with_name("amdsmi_stub.c")
    sources = [source, rest] if whole else [source]
    command = ["gcc", "-O1", "-shared", "-fPIC", "-o", folder / "libamd_smi.so", *sources]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("amdsmi"))


@pytest.fixture
def stub(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AmdStub:
    for name in ("ROCM_HOME", "ROCM_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setenv("GPU_STUB", str(tmp_path))
    return AmdStub(tmp_path)
