"""References in the arguments of a call, resolved when it is made (`gridctl.model.plans.Call`). Pure."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from gridagent.wire import LaunchSpec

_canonical = msgspec.json.Encoder(order="deterministic").encode


class Other(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank has of its own in how it is started: all else is as with any other rank of its job."""

    rank: int
    local_rank: int
    gpus: list[int]


def launch_reference(node: str, spec: LaunchSpec, other: Other | None = None) -> dict[str, Any]:
    """Stands for `spec`, which its node's agent tells again when the call is made, or for that of `other`."""
    told = {"node": node, "job": spec.job, "rank": spec.rank, "sha256": launch_digest(spec)}
    return {"$launch": told | ({"as": msgspec.to_builtins(other)} if other else {})}


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
            launch = launches[value["$launch"]["sha256"]]
            return _started_as(launch, value["$launch"]["as"]) if "as" in value["$launch"] else launch
        return {key: resolve(inner, results, launches) for key, inner in value.items()}
    if isinstance(value, list):
        return [resolve(inner, results, launches) for inner in value]
    return value


def _started_as(launch: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The launch of another rank out of that of one: `LaunchSpec` as a dict."""
    own = {"RANK": str(other["rank"]), "LOCAL_RANK": str(other["local_rank"])}
    env = {name: own.get(name, value) for name, value in launch["env"].items()}
    return {**launch, **other, "env": env}
