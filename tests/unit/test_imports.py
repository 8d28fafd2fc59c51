"""What starting a program costs is decided by what it imports: checked by name, in fresh interpreters."""

import json
import subprocess
import sys

import pytest

HEAVY = {
    "torch",
    "textual",
    "duckdb",
    "httpx",
    "aiohttp",
    "keyring",
    "numpy",
    "pynvml",
    "amdsmi",
    "rich",
    "yaml",
    "cryptography",
}

RUN_A_PROGRAM = """
import contextlib, importlib, io, json, sys
module, *arguments = sys.argv[1:]
sys.argv = ["program", *arguments]
out = io.StringIO()
with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
    importlib.import_module(module).main()
print(json.dumps({"out": out.getvalue(), "modules": sorted({name.split(".")[0] for name in sys.modules})}))
"""

IMPORT_THE_TRAINING_SIDE = """
import importlib, json, pkgutil, sys
import torch, torch.distributed, torch.distributed.fsdp, torch.distributed.checkpoint.state_dict, msgspec
import cryptography.hazmat.primitives.ciphers.aead
before = set(sys.modules)
import gridagent.train
for module in pkgutil.walk_packages(gridagent.train.__path__, "gridagent.train."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def fresh(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["version"], ["swap", "--help"], ["help", "exit-codes"]])
def test_gridctl_help_imports_nothing_heavy(arguments: list[str]) -> None:
    seen = json.loads(fresh(RUN_A_PROGRAM, "gridctl.cli", *arguments))
    assert seen["out"].strip()
    assert HEAVY & set(seen["modules"]) == set()


def test_gridagent_help_imports_nothing_heavy() -> None:
    seen = json.loads(fresh(RUN_A_PROGRAM, "gridagent.cli", "--help"))
    assert "serve" in seen["out"]
    assert HEAVY & set(seen["modules"]) == set()


def test_importing_the_command_line_imports_nothing_heavy() -> None:
    modules = json.loads(fresh("import json, sys, gridctl.cli.app; print(json.dumps(sorted(sys.modules)))"))
    assert HEAVY & {name.split(".")[0] for name in modules} == set()


def test_the_training_side_brings_only_torch_msgspec_and_cryptography() -> None:
    new = json.loads(fresh(IMPORT_THE_TRAINING_SIDE))
    foreign = {name for name in new if name.split(".")[0] not in sys.stdlib_module_names}
    allowed = (
        "gridagent.train", "gridagent.wire", "gridagent.framing", "gridagent.names", "gridagent.environment",
        "gridagent.redact", "gridagent.script", "torch", "msgspec", "cryptography",
    )  # fmt: skip
    unexpected = {
        n for n in foreign - {"gridagent"} if not any(n == a or n.startswith(a + ".") for a in allowed)
    }
    assert unexpected == set()
