"""The runbook `reset`: a GPU of a node that nobody uses is reset, or the node is rebooted. Pure.

There is no way back from it, so evidence comes first: without it, or a person's word why not, the step that
destroys does not begin (`may_be_reset`, which is asked right before it). The agent carries it out once for
each run, by the command that its site has written down; the node stays cordoned.
"""

from collections.abc import Iterator, Mapping

import msgspec

from gridagent.wire import Blocker, NodeStatus, ResetReport
from gridctl.errors import Refused
from gridctl.model.fleet import Node, Sample, jobs
from gridctl.model.plans import Call, Plan, Request, Step
from gridctl.model.policy import Policy
from gridctl.model.runs import Incident
from gridctl.runbook import basis, preflight
from gridctl.runbook.checks import Check, Context, Problem
from gridctl.runbook.evidence import LOST_BY, missing, newest
from gridctl.runbook.gates import seal
from gridctl.runbook.preflight import fatal
from gridctl.runbook.selection import refuse_if_fatal, status_of

#: What the two are called among the actions of findings.
GPU, REBOOT = "drain_and_reset_gpu", "evacuate_and_reboot"
#: Findings whose action is one of these are dealt with by this runbook.
OF_A_GPU = (GPU, "evacuate_and_reset_gpu", "reset_gpu_before_reuse", "defer_reset_to_window")
#: The keys of agent.toml, with an example.
COMMANDS = {
    "gpu": 'reset_gpu = ["nvidia-smi", "--gpu-reset", "-i", "{uuid}"]',
    "reboot": 'reboot = ["systemctl", "reboot"]',
}

#: A node may take five minutes to collect; then its archive is fetched.
EVIDENCE_S = 900.0
COMMAND_S = {"gpu": 180.0, "reboot": 60.0}
#: Until a GPU tells of itself again, or a node with much memory and many devices has booted.
BACK_S = {"gpu": 120.0, "reboot": 1800.0}
#: A sample is of now if it is no older; where it is not known when a reset ended, only such a one counts.
FRESH_S = 5.0

#: Failures of a call that are not the agent's own word.
NO_WORD = ("node-unreachable", "rank-silent")
#: As agents say; a process that is merely not connected may come back.
_LIVES = ("training", "standing", "frozen")


def command_for(action: str, node: str, device: str) -> str:
    """What to type for the action of a finding; "" where this runbook does not do it, or not know the GPU."""
    if action in OF_A_GPU and device.startswith("gpu:"):
        return f"gridctl reset plan {node} --gpu {device.removeprefix('gpu:')}"
    return f"gridctl reset plan {node} --reboot" if action == REBOOT else ""


def build(
    request: Request,
    nodes: Mapping[str, Node],
    samples: Mapping[str, Sample],
    incident: Incident,
    policy: Policy,
    *,
    plan_id: str,
    now_unix_s: float,
) -> Plan:
    """The sealed plan. `samples`: what the node's devices have told last. Raises `Refused`."""
    node = nodes.get(request.node)
    if node is None:
        raise Refused("unknown-node", f"the fleet has no node {request.node!r}; `gridctl nodes` lists them")
    refuse_if_fatal(list(preflight.of_node(node, "", policy)))
    refuse_if_fatal([*_standing(node, nodes), *in_the_way(node), *_impossible(request, node, samples)])
    action = GPU if request.devices else REBOOT
    collects = not request.waiver and missing(incident, action) is not None
    return seal(
        Plan(
            id=plan_id,
            runbook="reset",
            incident=incident.id,
            who=request.who,
            node=node.name,
            job="",
            devices=request.devices,
            created_unix_s=now_unix_s,
            expires_unix_s=now_unix_s + policy.plan_expiry_s,
            steps=list(_steps(request, node, samples, collects=collects)),
            relied_on=basis.of_node(node.name, nodes),
            action=action,
            waiver=request.waiver,
            notes=list(_notes(request, node, samples, incident, action)),
        )
    )


def in_the_way(node: Node) -> Iterator[Blocker]:
    """Every process of a job, and every spare, that a reset would take away, as far as agents know them."""
    status = status_of(node)
    if not status.complete:
        text = f"the agent of {node.name} has just begun: processes that it does not know may be on their way"
        yield fatal("not-idle", f"{text}. Plan again in ten seconds")
    for rank in status.ranks:
        if rank.state in _LIVES:
            text = f"rank {rank.rank} of {rank.job} (process {rank.pid}) is {rank.state} on {node.name}"
            yield fatal("not-idle", f"{text}: `gridctl swap plan {node.name}` moves it")
    for spare in status.spares:
        text = f"a spare is {spare.state} on {node.name}: end its process {spare.pid} there, and park another"
        yield fatal("not-idle", f"{text} elsewhere (`gridagent park`)")


def _standing(node: Node, nodes: Mapping[str, Node]) -> Iterator[Blocker]:
    for job in jobs(nodes.values()):
        if job.state == "standing" and any(rank.node == node.name for rank in job.ranks):
            text = f"{job.name} stands for want of a rank that was on {node.name}: first bring it on"
            yield fatal("job-stands", f"{text} (`gridctl swap plan {node.name}`)")


def _impossible(request: Request, node: Node, samples: Mapping[str, Sample]) -> Iterator[Blocker]:
    kind = _kind(request.devices)
    if len(request.devices) > 1 or any(not device.startswith("gpu:") for device in request.devices):
        yield fatal("bad-request", f"{request.devices} is not one GPU: a reset is of gpu:N")
    elif kind == "gpu" and request.devices[0] not in samples:
        known = ", ".join(sorted(name for name in samples if name.startswith("gpu:"))) or "no GPU"
        yield fatal(
            "unknown-device",
            f"{node.name} tells nothing of {request.devices[0]} (it tells of {known}): nobody could see"
            " whether it is back. Are `nvml` or `amdsmi` among the sources of its agent.toml?",
        )
    if kind not in status_of(node).resets:
        text = f"{node.name} has no command for that: write `{COMMANDS[kind]}` into its agent.toml"
        yield fatal("no-command", f"{text} and restart its agent")


def _kind(devices: list[str]) -> str:
    return "gpu" if devices else "reboot"


def _which(sample: Sample) -> dict[str, str]:
    """What tells this GPU from all others, as far as its driver has told it."""
    return {name: sample.about[name] for name in ("uuid", "pci") if name in sample.about}


# --------------------------------------------------------------------------------------------------


def _steps(request: Request, node: Node, samples: Mapping[str, Sample], *, collects: bool) -> Iterator[Step]:
    def call(kind: str, deadline_s: float, **args: str) -> Call:
        return Call(node=node.name, url=node.url, kind=kind, args=args, deadline_s=deadline_s)

    kind = _kind(request.devices)
    what = f"{request.devices[0]} of {node.name} is reset" if request.devices else f"{node.name} is rebooted"
    lets_go = [msgspec.structs.replace(call("run.end", 15.0), tolerate=["node-unreachable"])]
    yield Step(name="engage", text="the run takes the node", inverse=lets_go)
    if not status_of(node).cordoned:
        yield Step(
            name="cordon",
            text=f"cordon {node.name}: nothing new is placed on it; it stays so after the reset",
            calls=[call("node.cordon", 30.0, reason=f"gridctl reset: {what}")],
            verify="cordoned",
            inverse=[call("node.uncordon", 15.0)],
            stays_after="reset",
            deadline_s=45.0,
        )
    if collects:
        yield Step(
            name="evidence",
            text="take evidence, fetch it and check it; without it nothing is reset",
            calls=[call("evidence.collect", EVIDENCE_S)],
            deadline_s=EVIDENCE_S,
            hasty=True,
        )
    reset = {"boot": status_of(node).boot_id}
    if request.devices:  # a number may be another GPU's once the agent has begun anew
        reset |= {"device": request.devices[0], **_which(samples[request.devices[0]])}
    yield Step(
        name="reset",
        text=f"{what}, by the command in its agent.toml; there is no way back",
        calls=[call("node.reset", COMMAND_S[kind], **reset)],
        precheck="may-be-reset",
        verify="carried-out",
        deadline_s=COMMAND_S[kind] + 30.0 if kind == "gpu" else BACK_S[kind],
        commits=True,
    )
    back = (
        "it tells of itself again and asks for no recovery" if kind == "gpu" else "it answers in another boot"
    )
    yield Step(name="back", text=back, verify=f"{kind}-back", deadline_s=BACK_S[kind])
    yield Step(name="end", text="the run lets go of the node", calls=lets_go, deadline_s=30.0)


def _notes(
    request: Request, node: Node, samples: Mapping[str, Sample], incident: Incident, action: str
) -> Iterator[str]:
    status = status_of(node)
    yield f"there is no way back from it; it takes away {LOST_BY[action]}"
    if request.waiver:
        yield f"no evidence of {incident.id} is waited for, on the word of {request.who}: {request.waiver}"
    elif taken := newest(incident):
        yield f"evidence of {incident.id} was taken by {taken['who']}: {taken['file']}"
    else:
        yield f"no evidence of {incident.id} was taken yet: it is taken first, or nothing is reset"
    if action == REBOOT:
        yield "a process that was started neither with `gridagent exec` nor `park` is not seen, and ends"
    if request.devices and (which := _which(samples[request.devices[0]])):
        yield f"{request.devices[0]} is {' at '.join(which.values())}"
    if request.devices and (recovery := _recovery(samples[request.devices[0]])):
        yield f"the driver asks for recovery action {recovery:g} of {request.devices[0]}"
    if status.cordoned:
        yield f"{node.name} is cordoned by {status.cordon_owner or 'somebody'} ({status.cordon_reason})"
    yield f"{node.name} stays cordoned: `gridctl uncordon {node.name}` is for who has found it sound"


# --------------------------------------------------------------------------------------------------


def may_be_reset(context: Context) -> Problem | None:
    """Asked right before what cannot be undone: evidence or a waiver, and still nobody there."""
    plan = context.plan
    if not plan.waiver:
        if context.incident is None:
            return Problem("no-evidence", f"incident {plan.incident} is not known: nothing was reset")
        if problem := missing(context.incident, plan.action):
            return problem
    node = context.nodes.get(plan.node)
    if node is None or not node.reachable or node.status is None:
        why = node.error if node else "not asked"
        return Problem("node-unreachable", f"{plan.node} does not answer ({why}): unknown, nothing was reset")
    if node.status.boot_id != _boot_before(plan):
        return Problem("stale-plan", f"{plan.node} has booted since the plan was made: nothing was reset")
    if not node.status.cordoned:
        return Problem("not-idle", f"{plan.node} is not cordoned any more: nothing was reset")
    blocker = next(in_the_way(node), None)
    return Problem(blocker.code, f"{blocker.text}. Nothing was reset") if blocker else None


def _carried_out(context: Context) -> Problem | None:
    report = msgspec.convert(context.values[0], ResetReport)
    if report.status in (0, None) or _has_booted(context):
        return None
    begun = not report.text.startswith("not begun")
    known = " What it has done is not known, so the node stays cordoned" if begun else ""
    ended = f"ended by signal {-report.status}" if report.status < 0 else f"ended with status {report.status}"
    text = f"the command on {context.plan.node} {ended}: {report.text or 'it said nothing'}.{known}"
    return Problem("reset-failed", text, final=report.status > 0 or bool(context.plan.devices))


def _gpu_back(context: Context) -> Problem | None:
    """The device tells of itself since the reset, and its driver asks for nothing any more."""
    device, status = context.plan.devices[0], _answers(context)
    if status is None:
        return _silent(context)
    value = next(iter(context.done.get("reset", [])), None)
    ended_unix_s = None if value is None else msgspec.convert(value, ResetReport).t_unix_s
    since_unix_s = status.now_unix_s - FRESH_S if ended_unix_s is None else ended_unix_s
    sample = context.samples.get(device)
    if sample is None or sample.t_unix_s <= since_unix_s:
        return _not_back(f"{device} of {status.node} has told nothing since")
    asked_of = _reset_call(context.plan).args
    if any(asked_of.get(name, known) != known for name, known in _which(sample).items()):
        return _not_back(f"{device} of {status.node} is another GPU now")
    values = sample.values
    if values.get("lost"):
        return _not_back(f"{device} of {status.node} is lost")
    if all(value is None for name, value in values.items() if name != "lost"):
        return _not_back(f"{device} of {status.node} tells no value: its driver does not answer")
    asked = _recovery(sample)
    if asked is None:
        return _not_back(f"whether the driver asks for a recovery of {device} is not told")
    return _not_back(f"the driver still asks for recovery action {asked:g} of {device}") if asked else None


def _recovery(sample: Sample) -> float | None:
    """What the driver asks for, 0 also where it has no word for that; None: it does not say."""
    asked = sample.values.get("recovery_action", 0.0)
    return float(asked) if isinstance(asked, int | float) else None


def _reboot_back(context: Context) -> Problem | None:
    if _answers(context) is None:
        return _silent(context)
    if _has_booted(context):
        return None
    return _not_back(f"{context.plan.node} answers in the boot in which it was asked to reboot")


def settled(context: Context, *, final: bool) -> Problem | None:
    """What became of a reset whose report was lost, as `checks.settled`: "committed" for one that took place,
    "outcome-unknown" where only a person can go on, "node-unreachable" where the agent may know more, None
    while it may yet be seen."""
    plan, failure = context.plan, context.failure
    why = failure.text if failure else "nothing is known of it"
    if plan.devices:
        text = f"whether {plan.devices[0]} of {plan.node} was reset is not known ({why})"
        if failure and failure.code in NO_WORD:
            return Problem("node-unreachable", f"{text}: `gridctl run resume` asks once more how it ended")
        again = "It is not done again: look at it, then `gridctl run resume` goes on with what is seen"
        return Problem("outcome-unknown", f"{text}. {again}")
    if _has_booted(context):
        return Problem("committed", f"{plan.node} answers in another boot: it was rebooted")
    if final and _answers(context):
        text = f"{plan.node} answers in the same boot: it was not rebooted ({why})"
        return Problem("reset-failed", text)
    return None


CHECKS: dict[str, Check] = {
    "may-be-reset": may_be_reset,
    "carried-out": _carried_out,
    "gpu-back": _gpu_back,
    "reboot-back": _reboot_back,
}


def _not_back(text: str) -> Problem:
    return Problem("not-back", text, final=False)


def _silent(context: Context) -> Problem:
    node = context.nodes.get(context.plan.node)
    why = node.error if node else "not asked"
    return _not_back(f"{context.plan.node} does not answer ({why}): unknown, not failed")


def _answers(context: Context) -> NodeStatus | None:
    node = context.nodes.get(context.plan.node)
    return node.status if node and node.reachable else None


def _boot_before(plan: Plan) -> str:
    """The boot in which the reset is to take place, as its call says."""
    return str(_reset_call(plan).args["boot"])


def _reset_call(plan: Plan) -> Call:
    return next(call for step in plan.steps for call in step.calls if call.kind == "node.reset")


def _has_booted(context: Context) -> bool:
    status = _answers(context)
    return not context.plan.devices and status is not None and status.boot_id != _boot_before(context.plan)
