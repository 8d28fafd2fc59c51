"""Variables of a training process: what goes along to a spare, and what is told of the rest."""

import json
import os
import subprocess
import sys

import pytest

from gridagent.environment import ALL, TOLD_MAX, carried, told, withheld

OWN = {
    "HOSTNAME": "a", "HOME": "/root", "PWD": "/x", "SSH_AUTH_SOCK": "/s", "XDG_RUNTIME_DIR": "/r",
    "LANG": "C", "SLURM_JOB_ID": "7", "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "DB_PORT_5432_TCP_ADDR": "10.0.0.2", "PATH": "/b", "VIRTUAL_ENV": "/v", "CUDA_VISIBLE_DEVICES": "3",
    "NVIDIA_VISIBLE_DEVICES": "all", "RANK": "1", "TMPDIR": "/t", "MASTER_PORT": "1",
    "TORCHELASTIC_RUN_ID": "x", "GRIDAGENT_JOB": "lm", "WANDB_RUN_ID": "r", "PYTHONPATH": "/p",
    "https_proxy": "http://p", "INVOCATION_ID": "9", "_": "/usr/bin/env", "BASH_FUNC_module%%": "() { :; }",
}  # fmt: skip
#: What may change a result, and what is easily taken for something else.
WEIGHS = (
    "LOSS_SCALE", "OMP_NUM_THREADS", "MKL_CBWR", "NCCL_ALGO", "TORCH_LOGS", "CUBLAS_WORKSPACE_CONFIG",
    "PYTORCH_CUDA_ALLOC_CONF", "NVIDIA_TF32_OVERRIDE", "PYTHONHASHSEED", "LD_PRELOAD", "TEMP", "USE_CACHE",
    "DATA_DIRECTORY", "PROMPT_LENGTH", "HISTORY", "MASTER_WEIGHTS", "SLURM_ARRAY_TASK_ID", "WANDB_SWEEP_ID",
    "MODEL_VERSION", "FLUX_GUIDANCE", "OPENBLAS_NUM_THREADS", "TZ",
)  # fmt: skip


@pytest.mark.parametrize("name", WEIGHS)
def test_what_may_matter_is_told_and_a_changed_value_is_seen(name: str) -> None:
    here, there = told({**OWN, name: "1"}), told({**OWN, name: "2"})
    assert here is not None
    assert there is not None
    assert here.keys() == there.keys() == {name}
    assert here != there
    assert told({name: "1", "HOME": "/y"}) == here


@pytest.mark.parametrize("name", OWN)
def test_what_is_a_hosts_own_is_not_told(name: str) -> None:
    assert told({name: OWN[name]}) == {}


SECRETS = {"MY_API_KEY": "hush-1", "HF_TOKEN": "hush-2", "DATABASE_URL": "postgres://u:hush-3@db/x"}


def test_no_digest_of_a_secret_is_told_but_how_many_there_are() -> None:
    environ = {**OWN, **SECRETS, "LOSS_SCALE": "0.7"}
    assert (told(environ) or {}).keys() == {"LOSS_SCALE"}
    assert withheld(environ) == len(SECRETS)
    assert withheld({"XAUTHORITY": "/x", "SSH_AUTH_SOCK": "/s"}) == 0, (
        "of a login, which no script computes with"
    )


def test_what_is_told_is_small_ascii_and_without_values() -> None:
    odd = {"A\x1b[2J\n": "0.7", "B\udcff": "\udcfe", "C" * 9999: "0.7"}
    found = told(odd)
    assert found is not None
    assert len(found) == 3
    assert all(name.isascii() and name.isprintable() and len(name) <= 64 for name in found)
    assert "0.7" not in json.dumps(found)
    many = {f"V{number}": "1" for number in range(TOLD_MAX + 1)}
    assert (told(many) or {}).keys() == {ALL}
    assert told(many) != told({**many, "V3": "2"})
    assert len(told(dict(list(many.items())[1:])) or {}) == TOLD_MAX


def test_what_a_process_reads_only_as_it_starts_is_not_carried() -> None:
    assert carried({"PYTHONHASHSEED": "1", "OMP_DYNAMIC": "1", "OMP_NUM_THREADS": "1"}, ["*"]) == {
        "OMP_NUM_THREADS": "1"
    }


def test_what_gridagent_reads_of_a_job_is_carried() -> None:
    kept = {"GRIDAGENT_HOLD_S": "60", "GRIDAGENT_CUDA_INNER": "gloo"}
    assert carried({**kept, "GRIDAGENT_SOCKET": "/s", "GRIDAGENT_DAMAGE": "bit"}, []) == kept


def test_a_script_cannot_change_what_its_process_was_started_with() -> None:
    script = (
        "import json, os; os.environ['LOSS_SCALE'] = '1'; os.environ['LATER'] = '1'\n"
        "from gridagent.environment import started_with; print(json.dumps(started_with()))"
    )
    environ = {**os.environ, "LOSS_SCALE": "0.7"}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, check=True)
    seen = json.loads(done.stdout)
    assert seen["LOSS_SCALE"] == "0.7"
    assert "LATER" not in seen


BECOME = """
import os, sys
from gridagent import wire
from gridagent.train import park
from gridagent.train.context import CONTEXT
first = CONTEXT.environment
launch = wire.LaunchSpec(job="lm", rank=1, world_size=3, argv=["python", sys.argv[1]], cwd="/",
                         env={"MYJOB_LR": "2", "GRIDAGENT_CUDA_INNER": "gloo"})
park._become(wire.Specialise(handover="h", launch=launch, epoch=0, step=5))
now = CONTEXT.environment
assert first.keys() ^ now.keys() == {"MYJOB_LR"}, (first, now)
assert first["LOSS_SCALE"] == now["LOSS_SCALE"]
"""


def test_a_spare_tells_what_its_script_finds_and_forgets_what_is_a_jobs(tmp_path: os.PathLike[str]) -> None:
    script = os.path.join(tmp_path, "script.py")
    with open(script, "w", encoding="utf-8") as file:
        file.write("import os\nprint({k: v for k, v in os.environ.items() if k[:5] in ('GRIDA', 'MYJOB')})\n")
    environ = {**os.environ, "LOSS_SCALE": "0.7", "GRIDAGENT_HOLD_S": "9"}
    done = subprocess.run(
        [sys.executable, "-c", BECOME, script], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "'MYJOB_LR': '2'" in done.stdout
    assert "'GRIDAGENT_CUDA_INNER': 'gloo'" in done.stdout
    assert "GRIDAGENT_HOLD_S" not in done.stdout, "a moved rank holds a void step as its job does"
