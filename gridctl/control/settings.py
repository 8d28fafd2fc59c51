"""`fleet.toml` and `policy.toml`, validated."""

import re
import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gridctl.detect.policy import DetectPolicy, builtin
from gridctl.detect.policy.site import OverrideError, with_overrides
from gridctl.errors import ConfigError
from gridctl.home import Home
from gridctl.model.policy import Policy, XidOverride

T = TypeVar("T")


class FleetNode(msgspec.Struct, frozen=True, kw_only=True):
    """A `[[node]]` of fleet.toml."""

    name: str
    url: str
    rack: str = ""


class _Fleet(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    read_only: bool = False


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """fleet.toml"""

    fleet: _Fleet
    node: list[FleetNode] = []


def load_fleet(home: Home) -> Fleet:
    """Raises `ConfigError` that names the file and what is wrong in it."""
    fleet = _load(home.fleet_file, Fleet, "run `gridctl init` first")
    names = [node.name for node in fleet.node]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{home.fleet_file}: node {', '.join(twice)} stands in it twice")
    return fleet


def load_policy(home: Home) -> Policy:
    """The defaults where there is no policy.toml. Raises `ConfigError`."""
    path = home.policy_file
    if not path.exists():
        return Policy()
    text, table = _read(path, "")
    overrides = table.pop("xid", {})
    policy = _convert(path, table, Policy)
    if not isinstance(overrides, dict):
        raise ConfigError(f"{path}{_at(text, 'xid')}: xid is for tables like [xid.79], not {overrides!r}")
    policy = msgspec.structs.replace(
        policy, xid=dict(_override(path, text, name, entry) for name, entry in overrides.items())
    )
    try:
        detect_policy(policy)
    except OverrideError as error:
        where = _at(text, f"xid.{error.xid}", error.field)
        raise ConfigError(f"{path}{where}: [xid.{error.xid}]: {error}") from None
    return policy


def detect_policy(policy: Policy) -> DetectPolicy:
    """What detection judges by: the delivered tables, with the site's own word on Xids."""
    return with_overrides(builtin(), policy.xid)


def _override(path: Path, text: str, name: str, entry: Any) -> tuple[int, XidOverride]:
    if not (name.isascii() and name.isdecimal() and str(int(name[:9])) == name):
        raise ConfigError(
            f"{path}{_at(text, f'xid.{name}')}: [xid.{name}]: {name!r} is not the number of an Xid"
        )
    try:
        return int(name), msgspec.convert(entry, XidOverride)
    except msgspec.ValidationError as error:
        given = entry if isinstance(entry, dict) else {}
        field = next((word for word in re.findall(r"\w+", str(error)) if word in given), "")
        raise ConfigError(f"{path}{_at(text, f'xid.{name}', field)}: [xid.{name}]: {error}") from None


def _at(text: str, table: str, field: str = "") -> str:
    """ ", line N" of a field in a TOML table, or of its heading; "" where it is written another way."""
    inside, heading = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"\s*\[\s*([^\[\]]+?)\s*\]", line):
            inside = re.sub(r"[\s\"']", "", match[1])
            heading = heading or (number if inside == table else 0)
        key = re.sub(r"[\s\"']", "", line.partition("=")[0])
        if "=" in line and f"{inside}.{key}".lstrip(".") in (f"{table}.{field}", table if not field else ""):
            return f", line {number}"
    return f", line {heading}" if heading else ""


def _load(path: Path, kind: type[T], hint: str) -> T:
    return _convert(path, _read(path, hint)[1], kind)


def _read(path: Path, hint: str) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
        return text, tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: {hint}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _convert(path: Path, table: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from None
