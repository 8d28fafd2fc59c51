"""What a plan would do, call by call, without doing any of it. Pure."""

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlencode

import msgspec

from gridctl.model.plans import Call, DryCall, Plan, Step
from gridctl.runbook.progress import Progress
from gridctl.runbook.references import launches_in

_SECRET = re.compile("KEY|TOKEN|SECRET|PASS|CRED|AUTH")
HIDDEN = "(hidden)"


def dry_run(plan: Plan, urls: Mapping[str, str]) -> list[DryCall]:
    """Every call that applying `plan` would make, then every call that undoing it would make.

    `urls` holds all agents of the fleet: the lease is asked of each of them.
    """
    shown = leases(urls)
    for step in plan.steps:
        shown += _forward(plan, step, urls)
    for step in reversed(plan.steps):
        shown += _back(step, urls)
    return shown


def dry_rest(plan: Plan, progress: Progress, urls: Mapping[str, str], *, back: bool) -> list[DryCall]:
    """Every call that is left of a run: forward to its end, or `back`, as far as no call fails."""
    shown: list[DryCall] = []
    if back or progress.undoing:
        for step in reversed(plan.steps):
            if step.name not in progress.started or step.name in progress.undone:
                continue
            if not progress.stays(step, plan):
                left = [call for call in step.inverse if not progress.needless(call)]
                shown += _back(msgspec.structs.replace(step, inverse=left), urls)
        return shown
    for step in plan.steps:
        if step.name not in progress.done:
            shown += _forward(plan, step, urls)
    return shown


def leases(urls: Mapping[str, str]) -> list[DryCall]:
    """What taking the lease calls."""
    return [
        DryCall(step="lease", when="do", method="POST", url=f"{url}/v1/lease", kind="", args={"ttl_s": "..."})
        for _, url in sorted(urls.items())
    ]


def _forward(plan: Plan, step: Step, urls: Mapping[str, str]) -> Iterator[DryCall]:
    if step.precheck or step.verify:
        known = {member.node: member.url for member in plan.members} | {**urls}
        for url in sorted({known[name] for name in plan.nodes if name in known}):
            yield DryCall(step=step.name, when="do", method="GET", url=f"{url}/v1/status")
    for call in step.calls:
        yield from _calls(step.name, "do", call, urls)


def _back(step: Step, urls: Mapping[str, str]) -> Iterator[DryCall]:
    for call in step.inverse:
        yield from _calls(step.name, "undo", call, urls)


def redacted(value: Any, name: str = "") -> Any:
    """The value without anything that stands under the name of a secret."""
    if name and _SECRET.search(name.upper()):
        return HIDDEN
    if isinstance(value, Mapping):
        return {key: redacted(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list):
        return [redacted(inner) for inner in value]
    return value


def _calls(step: str, when: str, call: Call, urls: Mapping[str, str]) -> Iterator[DryCall]:
    for launch in launches_in(call.args):
        query = urlencode({"job": launch["job"], "rank": launch["rank"]})
        yield DryCall(
            step=step, when=when, method="GET", url=f"{urls.get(launch['node'], '')}/v1/launch?{query}"
        )
    if call.kind == "evidence.collect":  # asked before whether the node answers
        yield DryCall(step=step, when=when, method="GET", url=f"{call.url}/v1/status")
    yield DryCall(
        step=step,
        when=when,
        method="POST",
        url=f"{call.url}/v1/ops",
        kind=call.kind,
        args=redacted(_readable(call.args)),
    )
    if call.kind == "evidence.collect":  # which the controller fetches, too
        yield DryCall(step=step, when=when, method="GET", url=f"{call.url}/v1/evidence/ID")


def _readable(value: Any) -> Any:
    if isinstance(value, Mapping):
        if "$launch" in value:
            launch = value["$launch"]
            other = f", as rank {launch['as']['rank']}" if "as" in launch else ""
            of = f"launch of rank {launch['rank']} from {launch['node']}{other}"
            return f"({of}, sha256 {launch['sha256'][:12]})"
        if "$result" in value:
            step, index = value["$result"]
            return f"(answer {index} of step {step})"
        return {key: _readable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_readable(inner) for inner in value]
    return value
