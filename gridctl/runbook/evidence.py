"""The rule that evidence comes before what destroys it, and what is known of an incident's evidence. Pure.

The step that resets or reboots a node asks `missing` before it does: `gridctl.runbook.reset`.
"""

from collections.abc import Mapping
from typing import Any

from gridctl.model.runs import Incident
from gridctl.runbook.checks import Problem

#: What an action on a node takes away for good, by the actions of findings. Others take nothing away.
LOST_BY: Mapping[str, str] = {
    "collect_stacks_then_restart": "the stacks of the ranks and what their flight recorders have",
    "restart_app": "the stacks of the ranks and what their flight recorders have",
    "drain_and_reset_gpu": "the GPU's error counters since its last reset, and the driver's state",
    "evacuate_and_reset_gpu": "the GPU's error counters since its last reset, and the driver's state",
    "reset_gpu_before_reuse": "the GPU's error counters since its last reset, and the driver's state",
    "defer_reset_to_window": "the GPU's error counters since its last reset, and the driver's state",
    "rollback_driver": "the driver's state and its log in the kernel's ring buffer",
    "drain_then_restart_fabricmanager": "the fabric's state as the old process has it",
    "evacuate_and_reboot": "the kernel's ring buffer, every process and all counters that live in memory",
    "drain_and_replace_gpu": "the GPU, with its counters and its serial number",
    "evacuate_and_replace_gpu": "the GPU, with its counters and its serial number",
    "replace_gpu": "the GPU, with its counters and its serial number",
}


def missing(incident: Incident, action: str) -> Problem | None:
    """Why this action has to wait on the incident's node: it destroys what nobody has taken yet."""
    if action not in LOST_BY or taken(incident):
        return None
    return Problem(
        "no-evidence",
        f"{action} takes away {LOST_BY[action]}, and no evidence of {incident.id} was taken:"
        f" `gridctl collect {incident.id}` takes it, a plan with `--without-evidence WHY` does without",
    )


def taken(incident: Incident) -> bool:
    """Whether evidence of the incident's own node was fetched since it began."""
    return newest(incident) is not None


def newest(incident: Incident) -> dict[str, Any] | None:
    """The last evidence of the incident's own node that was fetched since it began, as its audit tells it."""
    its = [e for e in incident.evidence if e["node"] == incident.node and e["state"] == "collected"]
    return its[-1] if its else None
