"""References in the arguments of a call, resolved when it is made (`gridctl.model.plans.Call`). Pure."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from gridagent.wire import LaunchSpec

_canonical = msgspec.json.Encoder(order="deterministic").encode


def launch_reference(node: str, spec: LaunchSpec) -> dict[str, Any]:
    """Stands for `spec`, which its node's agent tells again when the call is made."""
    return {"$launch": {"node": node, "job": spec.job, "rank": spec.rank, "sha256": launch_digest(spec)}}


def result_reference(step: str, index: int = 0) -> dict[str, Any]:
    """Stands for the value of an earlier call."""
    return {"$result": [step, index]}


def launch_digest(spec: LaunchSpec) -> str:
    """SHA-256 over the spec's JSON, keys in order."""
    return hashlib.sha256(_canonical(spec)).hexdigest()


def launches_in(value: Any) -> Iterator[dict[str, Any]]:
    """All launch references in some arguments."""
    if isinstance(value, Mapping):
        if "$launch" in value:
            yield value["$launch"]
        else:
            for inner in value.values():
                yield from launches_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from launches_in(inner)


def resolve(value: Any, results: Mapping[str, list[Any]], launches: Mapping[str, Any]) -> Any:
    """`value` with every reference replaced. `launches`: sha256 -> launch spec as a dict."""
    if isinstance(value, Mapping):
        if "$result" in value:
            step, index = value["$result"]
            return results[step][index]
        if "$launch" in value:
            return launches[value["$launch"]["sha256"]]
        return {key: resolve(inner, results, launches) for key, inner in value.items()}
    if isinstance(value, list):
        return [resolve(inner, results, launches) for inner in value]
    return value
