"""What a log, a tool's output or telemetry means: one layer a module, the most severe diagnosis first.

A layer is a function of all materials: it takes up what it understands and leaves the rest. No layer ever
raises for what a material says. What no layer understands is a diagnosis of its own, `missing_data`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from gridctl.detect.diagnose.checkpoint_facts import checkpoint_facts
from gridctl.detect.diagnose.checkpoint_files import checkpoint_files
from gridctl.detect.diagnose.devices import devices
from gridctl.detect.diagnose.documents import refusals
from gridctl.detect.diagnose.fleet import fleet
from gridctl.detect.diagnose.flight_recorder import flight_recorder
from gridctl.detect.diagnose.nccl import nccl
from gridctl.detect.diagnose.nic import nic
from gridctl.detect.diagnose.progress import progress
from gridctl.detect.diagnose.rdma import rdma, slurmstepd
from gridctl.detect.diagnose.replicas import replicas
from gridctl.detect.diagnose.resume import resume
from gridctl.detect.diagnose.slurm import slurm
from gridctl.detect.diagnose.slurm_events import slurm_events
from gridctl.detect.diagnose.spares import spares
from gridctl.detect.diagnose.torch_log import torch_log
from gridctl.detect.policy import DetectPolicy
from gridctl.model.diagnosis import Diagnosis, Material, Why
from gridctl.model.findings import SEVERITIES

#: Diagnoses by one rule that are kept, the first ones.
_SAME_RULE_MAX = 16_384

Layer = Callable[[Sequence[Material]], Iterable[Diagnosis]]

#: What comes after the devices.
LAYERS: tuple[Layer, ...] = (
    fleet,
    progress,
    spares,
    nccl,
    nic,
    rdma,
    torch_log,
    flight_recorder,
    slurm,
    slurm_events,
    slurmstepd,
    checkpoint_files,
    checkpoint_facts,
    resume,
    replicas,
    refusals,
)


def diagnose(materials: Sequence[Material], policy: DetectPolicy | None = None) -> list[Diagnosis]:
    """All diagnoses, the most severe first; equally severe ones in the order of the layers.

    `policy` has the site's own word on Xids; default: as delivered.
    """
    found = list(devices(materials, policy))
    found += [diagnosis for layer in LAYERS for diagnosis in _first_of_each_rule(layer(materials))]
    if not found:
        found = [_nothing(materials)]
    return sorted(found, key=lambda diagnosis: -SEVERITIES.index(diagnosis.severity))


def _first_of_each_rule(diagnoses: Iterable[Diagnosis]) -> Iterator[Diagnosis]:
    """Some layers have one for each document, and there may be millions of these."""
    counts: dict[str, int] = {}
    for diagnosis in diagnoses:
        count = counts[diagnosis.why.rule] = counts.get(diagnosis.why.rule, 0) + 1
        if count <= _SAME_RULE_MAX:
            yield diagnosis


def _nothing(materials: Sequence[Material]) -> Diagnosis:
    names = ", ".join(material.name for material in materials) or "no input"
    return Diagnosis(
        kind="missing_data",
        severity="info",
        action="manual_review",
        fault="unknown",
        preempt_job=False,
        when="none",
        why=Why(rule="nothing-understood", evidence=[f"nothing in {names} is understood"], source="-"),
    )
