"""What a log, a tool's output or telemetry means: one layer a module, the most severe diagnosis first.

A layer is a function of all materials: it takes up what it understands and leaves the rest. No layer ever
raises for what a material says. What no layer understands is a diagnosis of its own, `missing_data`.
"""

from collections.abc import Callable, Iterable, Sequence

from gridctl.model.diagnosis import Diagnosis, Material, Why
from gridctl.model.findings import SEVERITIES

Layer = Callable[[Sequence[Material]], Iterable[Diagnosis]]

LAYERS: tuple[Layer, ...] = ()


def diagnose(materials: Sequence[Material]) -> list[Diagnosis]:
    """All diagnoses, the most severe first; equally severe ones in the order of the layers."""
    found = [diagnosis for layer in LAYERS for diagnosis in layer(materials)]
    if not found:
        found = [_nothing(materials)]
    return sorted(found, key=lambda diagnosis: -SEVERITIES.index(diagnosis.severity))


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
