"""What stands in the way of a swap, said before anybody confirms it. Pure.

A fatal `Blocker` makes the swap impossible; one that is not fatal makes it not bit-identical.
"""

from collections.abc import Iterable, Iterator, Mapping

from gridagent.script import script_of
from gridagent.wire import WIRE_VERSION, Blocker, LaunchSpec, NodeStatus, SessionReport
from gridctl.model.fleet import GIVEN_UP, Job, Node, Spare, several
from gridctl.model.policy import Policy

Rates = Iterable[tuple[int, float]]


def fatal(code: str, text: str) -> Blocker:
    """A blocker that makes the swap impossible."""
    return Blocker(code=code, text=text, fatal=True)


def of_node(node: Node, job: str, policy: Policy) -> Iterator[Blocker]:
    """What forbids any action on a node that takes part, whatever its role."""
    status = node.status
    if not node.reachable or status is None:
        why = node.error or "no answer yet"
        yield fatal(
            "node-unreachable",
            f"{node.name} does not answer ({why}). Its state is unknown, which is not the same as failed:"
            " nothing is done with it. Reach its agent (`gridctl doctor`), then plan again",
        )
        return
    if status.wire != WIRE_VERSION:
        yield fatal(
            "version-skew",
            f"the agent of {node.name} speaks version {status.wire} of the messages, this controller"
            f" {WIRE_VERSION}: install matching versions",
        )
    if abs(node.skew_s) > policy.clock_skew_max_s:
        yield fatal(
            "clock-skew",
            f"the clock of {node.name} is {node.skew_s:+.1f} s off, the policy allows"
            f" {policy.clock_skew_max_s:g} s: repair its time service",
        )
    if scope := next((scope for scope in status.frozen if scope in ("fleet", job)), ""):
        what = "the fleet" if scope == "fleet" else f"job {scope}"
        by = f" by {who}" if (who := status.frozen_by.get(scope)) else ""  # an older agent does not say
        yield fatal("frozen", f"{what} is frozen on {node.name}{by}: `gridctl thaw` when the reason is gone")
    if policy.require_attestation and status.attestation != "attested":
        yield fatal(
            "not-attested",
            f"the policy requires attestation and {node.name} is {status.attestation}: attest it, or"
            " change require_attestation in policy.toml",
        )


def of_job(job: Job) -> Iterator[Blocker]:
    """What forbids a swap in a job: every rank must be known and at work, or wait where others stand."""
    stands = any(rank.state == "standing" for rank in job.ranks)
    present = {rank.rank for rank in job.ranks}
    for missing in sorted(set(range(job.world_size)) - present):
        yield fatal(
            "node-unreachable",
            f"nobody reports rank {missing} of {job.name}: the node that has it is unknown or does not"
            " answer; add it to fleet.toml or reach its agent",
        )
    for rank in job.ranks:
        if rank.state == "unknown":
            yield fatal(
                "node-unreachable",
                f"rank {rank.rank} of {job.name} is on {rank.node}, which does not answer (or has just begun"
                " to, and waits for its processes): it is unknown, not failed",
            )
        elif stands and rank.state in ("standing", *GIVEN_UP):
            continue
        elif stands and rank.state == "training":
            yield fatal(
                "rank-silent",
                f"rank {rank.rank} of {job.name} on {rank.node} (process {rank.pid}) has not come to stand"
                f" as the others have: it is said to train in step {rank.step}. If that is still so in a"
                " moment its process was stopped or hangs: let it go on, or end it, then plan again",
            )
        elif rank.state != "training":
            yield fatal(
                "rank-silent" if rank.state == "lost" else "nothing-to-move",
                f"rank {rank.rank} of {job.name} on {rank.node} is {rank.state}; a live hand-over needs all"
                " ranks at work",
            )


def of_spare(source: NodeStatus, gpus: int, spare: Spare, node: Node, policy: Policy) -> Iterator[Blocker]:
    """What forbids giving a rank with `gpus` devices of the source's node to this spare."""
    status = node.status
    if status is None or not node.reachable:
        yield fatal("node-unreachable", f"the spare's node {node.name} does not answer: unknown, not failed")
        return
    same_serial = bool(status.serial) and status.serial == source.serial
    if node.name == source.node or same_serial:
        why = f"both say chassis serial {status.serial}" if same_serial else "it is the node to leave"
        yield fatal(
            "same-host",
            f"the spare on {node.name} is on the machine of {source.node} ({why}): a swap would change"
            " nothing; park a spare on another machine",
        )
    if status.quarantined:
        yield fatal(
            "spare-quarantined",
            f"{node.name} is quarantined: its spare takes no rank until `gridctl uncordon {node.name}`",
        )
    elif status.cordoned:
        who = status.cordon_owner or "somebody"
        lift = f"`gridctl uncordon {node.name}`" if who == "gridctl" else f"ask {who}"
        yield fatal(
            "spare-quarantined",
            f"{node.name} is cordoned by {who} ({status.cordon_reason or 'no reason'}): once it is sound,"
            f" {lift}, or park a spare elsewhere",
        )
    if len(spare.gpus) != gpus:
        yield fatal(
            "spare-size",
            f"the spare on {node.name} has {len(spare.gpus)} GPUs, the rank uses {gpus}: park one alike",
        )
    yield from _alike(source, status, policy)


def _alike(source: NodeStatus, spare: NodeStatus, policy: Policy) -> Iterator[Blocker]:
    if source.gpu_model != spare.gpu_model:
        yield fatal(
            "spare-size",
            f"{spare.node} has GPUs of model {spare.gpu_model or 'unknown'}, {source.node} of"
            f" {source.gpu_model or 'unknown'}: use a spare of the same model",
        )
    if source.driver != spare.driver:
        theirs, ours = spare.driver or "unknown", source.driver or "unknown"
        text = f"{spare.node} runs driver {theirs}, {source.node} {ours}:"
        if policy.require_same_driver:
            text += " the policy asks for the same (require_same_driver)"
            yield fatal("spare-driver", text)
        else:
            yield Blocker(
                code="driver-differs", text=f"{text} results may differ in the last bits", fatal=False
            )
    if policy.require_same_rack and (source.rack != spare.rack or not source.rack):
        yield fatal(
            "spare-rack",
            f"{spare.node} stands in rack {spare.rack or 'unknown'}, {source.node} in"
            f" {source.rack or 'unknown'}: the policy asks for the same (require_same_rack)",
        )


#: Facts that the training script sets: a spare shares them only once it has run the script. They are
#: compared when it is warm (`checks`), and a difference turns the run back before anything was paused.
SET_BY_SCRIPT = frozenset(
    {"threads", "interop_threads", "mkldnn", "deterministic", "matmul_precision", "default_dtype", "script"}
)


def of_reports(source: SessionReport, facts: Mapping[str, str], spare_node: str) -> Iterator[Blocker]:
    """The source's own blockers, and every fact that decides numerics and differs at the spare."""
    yield from source.blockers
    yield from _agent_code(source, facts.get("agent_code", ""), spare_node)
    for key, here in sorted(source.facts.items()):
        there = facts.get(key)
        if key not in SET_BY_SCRIPT | {"agent_code"} and there is not None and there != here:
            yield Blocker(
                code=f"{key}-differs",
                text=f"{key}: rank {source.rank} has {here}, the spare on {spare_node} has {there}; the swap"
                " is possible but later losses may differ in the last bits",
                fatal=False,
            )


def of_launch(source: SessionReport, launch: LaunchSpec) -> Iterator[Blocker]:
    """That a spare cannot run the rank's command line."""
    if launch.argv and not script_of(launch.argv):
        started = " ".join(launch.argv[:2])
        yield fatal(
            "command-line",
            f"rank {source.rank} was started by {ascii(started)[1:-1][:COMMAND_CHARS_MAX]} ...: a spare can"
            " run `python SCRIPT ...` or `python -m MODULE ...`, with no option of the interpreter but -u, -B"
            " and -q",
        )


def of_environment(source: SessionReport, launch: LaunchSpec, spare: Spare) -> Iterator[Blocker]:
    """The variables that the script would find otherwise at the spare. `source` tells of the job's process,
    `launch` has what goes along."""
    here, there = source.environment, spare.environment
    script = f"the script of rank {source.rank} would run on {spare.node}"
    if here is None or there is None:
        whose = f"rank {source.rank}" if here is None else f"the spare on {spare.node}"
        text = f"{script} with environment variables that cannot be compared: {whose} does not tell its own"
        yield Blocker(code="environment", text=text, fatal=False)
        return
    names = {name for name in here.keys() | there.keys() if here.get(name) != there.get(name)}
    if differ := names - launch.env.keys():
        shown = several(
            "too many to tell them singly" if name == "=" else ascii(name)[1:-1][:ENV_NAME_CHARS_MAX]
            for name in differ
        )
        yield Blocker(
            code="environment",
            text=f"{script} with other environment variables than in the job: {shown} (values are not told)."
            " If it reads one of them, this becomes another run. Start the spare with those of the job, or"
            " start the job with their names in env_allow of agent.toml, and they go along (but for what a"
            " process reads only as it starts: PYTHONHASHSEED, LD_*)",
            fatal=False,
        )


def _agent_code(source: SessionReport, there: str, spare_node: str) -> Iterator[Blocker]:
    """Not a matter of numerics: two processes whose gridagent.train differs may not understand each other."""
    if (here := source.facts.get("agent_code", "")) != there:
        yield fatal(
            "agent-code-differs",
            f"the spare on {spare_node} runs other code of gridctl-agent than rank {source.rank}"
            f" ({there or 'an older one'} and {here or 'an older one'}): they would not speak the same"
            " protocol. A process keeps the code that it was started with: install the rank's on"
            f" {spare_node}, end the spare and park it anew",
        )


ENV_NAME_CHARS_MAX = 64
COMMAND_CHARS_MAX = 120


def pause_s(state_bytes: int, rates: Rates) -> tuple[float, str]:
    """Estimate of the pause for moving so much state, and what it rests on.

    `rates`: (bytes, milliseconds) of earlier cuts of this fleet.
    """
    measured = [(size, ms) for size, ms in rates if size > 0 and ms > 0]
    if measured:
        slowest = min(size / ms for size, ms in measured) * 1000
        basis = f"estimate from {len(measured)} earlier cuts here, the slowest at {slowest / 1e9:.2f} GB/s"
        return state_bytes / slowest, basis
    return 0.15 + state_bytes / ASSUMED_BYTES_PER_S, (
        f"estimate without a measurement of this fleet: {ASSUMED_BYTES_PER_S / 1e9:g} GB/s assumed"
    )


#: Sealing, sending and hashing on one ordinary core; a fleet's own cuts replace it.
ASSUMED_BYTES_PER_S = 0.5e9
