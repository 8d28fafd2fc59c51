"""What this training process is: alone, a live rank with an agent, or a spare on its way to a rank."""

import os
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gridagent import wire
from gridagent.environment import started_with, told
from gridagent.train.code import AGENT_CODE, script_digest
from gridagent.train.group import GroupRegistry
from gridagent.train.link import Link


@dataclass
class Context:
    """One a process. `park` fills the spare's part before the user's script starts."""

    registry: GroupRegistry = field(default_factory=GroupRegistry)
    session_id: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
    link: Link | None = None
    spare: wire.Specialise | None = None
    warm: threading.Event = field(default_factory=threading.Event)
    failed: str = ""  #: why a spare's script ended before it was warm
    session: Any = None  #: the one `Session` of the process
    script: str = ""  #: digest of the script; "" before there is a session
    #: Digests of the variables that the script finds, see `gridagent.environment`.
    environment: dict[str, str] | None = field(default_factory=lambda: told(started_with()))

    def say_hello(self) -> wire.Hello:
        """The first frame of every connection to the agent."""
        if self.session is not None:
            hello: wire.Hello = self.session.hello()
            return hello
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return wire.Hello(
            role="spare",
            session=self.session_id,
            pid=os.getpid(),
            facts=self.facts(),
            environment=self.environment,
            gpus=[int(device) for device in visible.split(",") if device.strip().isdecimal()],
        )

    def read_script(self) -> None:
        """Takes the digest of the script, and of what it has imported, as the files are now."""
        self.script = script_digest(self.spare.launch.cwd if self.spare else "")

    def take_over(self, launch: Mapping[str, str]) -> None:
        """The script will find these variables of its rank beside those of this process."""
        own = started_with()
        self.environment = None if own is None else told({**own, **launch})

    def facts(self) -> dict[str, str]:
        """What a spare must have in common with the rank that it takes: code, and what decides numerics."""
        return {
            **numeric_facts(),
            "agent_code": AGENT_CODE,
            **({"script": self.script} if self.script else {}),
        }

    def connect(self) -> Link | None:
        """The link to this node's agent; None without one."""
        path = os.environ.get("GRIDAGENT_SOCKET")
        if self.link is None and path:
            self.link = Link(path, self.say_hello)
            self.link.start()
        return self.link


def numeric_facts() -> dict[str, str]:
    """What decides a result's last bit; a spare whose facts differ cannot promise bit identity."""
    import torch

    facts = {
        "torch": str(torch.__version__),
        "threads": str(torch.get_num_threads()),
        "interop_threads": str(torch.get_num_interop_threads()),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": str(torch.backends.mkldnn.enabled),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "default_dtype": str(torch.get_default_dtype()),
    }
    if torch.cuda.is_available():
        facts |= {
            "cuda": str(torch.version.cuda),
            "gpu": torch.cuda.get_device_name(0),
            "cudnn": str(torch.backends.cudnn.version()),
            "cudnn_benchmark": str(torch.backends.cudnn.benchmark),
            "tf32_matmul": str(torch.backends.cuda.matmul.allow_tf32),
            "tf32_cudnn": str(torch.backends.cudnn.allow_tf32),
        }
    return facts


CONTEXT = Context()
