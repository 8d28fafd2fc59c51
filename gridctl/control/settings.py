"""`fleet.toml` and `policy.toml`, validated."""

import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gridctl.errors import ConfigError
from gridctl.home import Home
from gridctl.model.policy import Policy

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
    if not home.policy_file.exists():
        return Policy()
    return _load(home.policy_file, Policy, "")


def _load(path: Path, kind: type[T], hint: str) -> T:
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return msgspec.convert(table, kind)
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: {hint}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from None
