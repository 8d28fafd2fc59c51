"""Environment variables of a training process: which go from a rank to its spare, and which are compared.

What is carried is a list of names. Everything else a spare has from where it was parked, and a script that
reads it there may train something else. So ranks and spares tell a short digest for each variable that they
were started with, but never a value, and a plan says which differ.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase, translate
from pathlib import Path

from gridagent.redact import is_secret, redacted_text

#: What gridagent itself reads and a job decides: a spare forgets its own and takes the rank's.
OF_THE_JOB = ("GRIDAGENT_HOLD_S", "GRIDAGENT_CUDA_INNER")

CARRIED = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_*",
    "OMP_*",
    "MKL_*",
    "TORCH_*",
    "NCCL_*",
    "GLOO_*",
    "CUDA_*",
    "CUBLAS_*",
    "PYTHON*",
    "HF_*",
    *OF_THE_JOB,
)

#: Read once, as an interpreter, libgomp or torch begins. A parked spare has begun: it has its own for good,
#: so these are compared and not carried.
READ_AT_START = (
    "PYTHONHASHSEED",
    "PYTHONOPTIMIZE",
    "OMP_DYNAMIC",
    "OMP_THREAD_LIMIT",
    "TORCH_ALLOW_TF32_*",
    "TORCH_BLAS_PREFER_*",
    "TORCH_LINALG_PREFER_*",
)

#: What is a process's, host's or login's own, or has no say in what is computed: it may differ. Narrow where
#: a hyperparameter might be called so.
NOT_COMPARED = (
    # gridctl, and a rank's place in its job
    *("GRIDAGENT_*", "GRIDCTL_*", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"),
    *(
        "MASTER_PORT",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "ROLE_NAME",
        "NODE_RANK",
    ),
    *("TORCHELASTIC_*", "PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_RDZV_*", "PET_MASTER_*"),
    # which devices (a spare has its own, their model is a fact), and which network interfaces
    *("*_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "GPU_DEVICE_ORDINAL", "NVIDIA_DRIVER_CAPABILITIES"),
    *("NVIDIA_REQUIRE_*", "*_SOCKET_IFNAME", "NCCL_IB_HCA"),
    # host, login, shell and terminal; LANG and LC_* too, the language of messages
    *(
        "HOSTNAME",
        "HOST",
        "HOSTTYPE",
        "MACHTYPE",
        "OSTYPE",
        "NODE_NAME",
        "NODENAME",
        "HOME",
        "USER",
        "USERNAME",
    ),
    *("LOGNAME", "UID", "EUID", "SHELL", "SHLVL", "PWD", "OLDPWD", "_", "MAIL", "LANG", "LANGUAGE", "LC_*"),
    *("TERM", "TERM_PROGRAM*", "TERM_SESSION_ID", "TERMINFO", "COLORTERM", "COLUMNS", "LINES", "LS_COLORS"),
    *("LSCOLORS", "LESS", "LESSOPEN", "LESSCLOSE", "PAGER", "EDITOR", "VISUAL", "HISTSIZE", "HISTFILE*"),
    *(
        "HISTCONTROL",
        "HISTIGNORE",
        "HISTTIMEFORMAT",
        "PS[1-4]",
        "PROMPT_COMMAND",
        "PROMPT_DIRTRIM",
        "BASHOPTS",
    ),
    *("BASH_*", "ZSH", "ZSH_*", "WINDOWID", "TMUX*", "STY", "VTE_*", "DISPLAY", "XAUTHORITY", "WAYLAND_*"),
    *("XDG_*", "DBUS_*", "SSH_*", "GPG_*", "SUDO_*", "MOTD_*", "DEBIAN_FRONTEND", "which_declare", "GIT_SS*"),
    # a service of systemd
    *(
        "INVOCATION_ID",
        "JOURNAL_STREAM",
        "NOTIFY_SOCKET",
        "MANAGERPID*",
        "MAINPID",
        "SYSTEMD_*",
        "WATCHDOG_*",
    ),
    *(
        "LISTEN_FDS",
        "LISTEN_PID",
        "LISTEN_FDNAMES",
        "RUNTIME_DIRECTORY",
        "STATE_DIRECTORY",
        "CACHE_DIRECTORY",
    ),
    *("LOGS_DIRECTORY", "CONFIGURATION_DIRECTORY", "MEMORY_PRESSURE_*"),
    # a step of a scheduler, and what starts processes for it
    *("SLURM_*", "SLURMD_*", "SBATCH_*", "SRUN_*", "PBS_*", "PALS_*", "PMI_*", "PMIX_*", "PRTE_*", "OMPI_*"),
    *("HYDRA_*", "HYDI_*", "MPIR_*", "LSB_*", "LSF_*", "SGE_*", "FLUX_URI", "FLUX_JOB_*", "FLUX_TASK_*"),
    *("FLUX_KVS_*", "FLUX_PMI_*", "FLUX_EXEC_*", "FLUX_CONNECTOR_*", "COBALT_*", "NOMAD_*", "JOB_ID"),
    # a pod or container, and the addresses of the services about it
    *(
        "KUBERNETES_*",
        "POD_*",
        "VC_TASK_INDEX",
        "VC_*_HOSTS",
        "VC_*_NUM",
        "*_SERVICE_HOST",
        "*_SERVICE_PORT*",
    ),
    *("*_PORT", "*_PORT_*_TCP*", "*_PORT_*_UDP*", "container", "CONTAINER_*", "DOCKER_*", "SINGULARITY*"),
    *("APPTAINER*", "NV_*"),
    # where programs and code lie: the code of a script is compared by its content, see `train/code.py`
    *(
        "PATH",
        "MANPATH",
        "INFOPATH",
        "VIRTUAL_ENV*",
        "CONDA_*",
        "_CE_*",
        "MAMBA_*",
        "PYENV_*",
        "UV_*",
        "PIP_*",
    ),
    *("POETRY_*", "MODULEPATH*", "MODULESHOME", "MODULES_CMD", "LOADEDMODULES", "_LMFILES_*", "LMOD_*"),
    *("__LMOD_*", "PKG_CONFIG_PATH", "CPATH", "LIBRARY_PATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH"),
    *(
        "PYTHONPATH",
        "PYTHONHOME",
        "PYTHONSTARTUP",
        "PYTHONUSERBASE",
        "PYTHONNOUSERSITE",
        "PYTHONPYCACHEPREFIX",
    ),
    # how a program talks, not what it computes
    *(
        "PYTHONUNBUFFERED",
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONFAULTHANDLER",
        "PYTHONBREAKPOINT",
        "PYTHONWARNINGS",
    ),
    *("PYTHONIOENCODING", "PYTHONUTF8", "RUST_BACKTRACE", "RUST_LOG", "RUSTUP_*", "NODE_OPTIONS"),
    # scratch and caches, ways to the outside, trackers
    *("TMPDIR", "TMP", "*_CACHE_DIR", "*_CACHE_PATH", "MPLCONFIGDIR", "MALLOC_*", "*_proxy", "*_PROXY"),
    *("*_CA_BUNDLE", "*_CA_CERTS*", "*CACERT*", "SSL_CERT_*", "AWS_*", "AZURE_*", "GOOGLE_*", "GCLOUD_*"),
    *("CLOUDSDK_*", "WANDB_*", "MLFLOW_*", "COMET_*", "NEPTUNE_*", "CLEARML_*", "OTEL_*", "SENTRY_*"),
)

#: Compared in spite of that: an index in an array of jobs, or a sweep, chooses hyperparameters.
CHOOSES = ("SLURM_ARRAY_TASK_ID", "PBS_ARRAY*", "SGE_TASK_ID", "LSB_JOBINDEX", "WANDB_SWEEP_*")

_NOT_COMPARED = re.compile("|".join(map(translate, NOT_COMPARED)))  # many names meet many patterns
#: More are told as one digest under `ALL`, which is no name of a variable.
TOLD_MAX = 128
ALL = "="
_NAME_CHARS_MAX = 64


def carried(environ: Mapping[str, str], also: Iterable[str]) -> dict[str, str]:
    """The part of `environ` that a launch keeps. `also` holds further patterns (agent.toml: env_allow).

    A name that looks like a secret's is never kept, whatever the lists say.
    """
    allow = (*CARRIED, *also)
    return {
        name: value
        for name, value in environ.items()
        if not is_secret(name) and not _fits(name, READ_AT_START) and _fits(name, allow)
    }


def withheld(environ: Mapping[str, str]) -> int:
    """How many variables are neither carried nor compared because they may be secrets."""
    return sum(_is_compared(name) and _may_be_secret(name, value) for name, value in environ.items())


def told(environ: Mapping[str, str] | None) -> dict[str, str] | None:
    """Name -> a short digest of name and value, of all variables that are compared; None: not known.

    Names are ASCII and cut; of too many there is one digest of all.
    """
    if environ is None:
        return None
    lines = {
        ascii(name)[1:-1][:_NAME_CHARS_MAX]: f"{name}={value}"
        for name, value in sorted(environ.items())
        if _is_compared(name) and not _may_be_secret(name, value)
    }
    if len(lines) > TOLD_MAX:
        return {ALL: _digest("\0".join(lines.values()))}
    return {name: _digest(line) for name, line in lines.items()}


def started_with() -> dict[str, str] | None:
    """The environment that this process was started with, which no script has changed; None: not readable."""
    try:
        items = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    pairs = (os.fsdecode(item).partition("=") for item in items if b"=" in item)
    return {name: value for name, _, value in pairs}


def _is_compared(name: str) -> bool:
    return not _NOT_COMPARED.match(name) or _fits(name, CHOOSES)


def _may_be_secret(name: str, value: str) -> bool:
    return is_secret(name) or redacted_text(value) != value


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _digest(line: str) -> str:
    return hashlib.sha256(os.fsencode(line)).hexdigest()[:8]
