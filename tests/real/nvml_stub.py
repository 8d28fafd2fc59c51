"""Compiles the stub of NVML (nvml_stub.c) and steers it; fixtures for the tests that read GPUs."""

import subprocess
from pathlib import Path

import pytest


class Stub:
    """The folder that says what the stub answers."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def set(self, name: str, value: object) -> None:
        (self.root / name).parent.mkdir(exist_ok=True)
        new = self.root / "new"
        new.write_text(f"{value}\n")
        new.rename(self.root / name)

    def clear(self, name: str) -> None:
        (self.root / name).unlink()

    def lines(self, name: str) -> list[str]:
        file = self.root / name
        return file.read_text().splitlines() if file.exists() else []


def compiled(folder: Path, *flags: str) -> Path:
    folder.mkdir()
    source = Path(__file__).with_name("nvml_stub.c")
    library = str(folder / "libnvidia-ml.so.1")
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", *flags, "-o", library, str(source)], check=True)
    return folder


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("nvml") / "new")


@pytest.fixture
def stub(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setenv("GPU_STUB", str(tmp_path))
    return Stub(tmp_path)
