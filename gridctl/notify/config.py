"""`notify.toml`: who is told of what, and how."""

import re
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import msgspec

from gridctl.errors import ConfigError
from gridctl.model.findings import SEVERITIES

#: What routes, groups and silences may look at.
LABELS = ("incident", "kind", "severity", "node", "rack", "job", "owner")

Kind = Literal["alertmanager", "pagerduty", "slack", "webhook", "mail"]
Labels = dict[str, str]

_SCHEMES = {"mail": ("smtp://", "smtps://")}
_REFERENCE = re.compile(r"(env|file):.+")


class Receiver(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `[[receiver]]`. `url` and `secret` may be "env:NAME" or "file:PATH": then they stand nowhere else."""

    name: str
    kind: Kind
    url: str  #: of Alertmanager its root; of mail smtp://HOST:PORT (STARTTLS where offered) or smtps://
    secret: str = (
        ""  #: PagerDuty's routing key, a bearer token, the key that signs a webhook, a mail password
    )
    user: str = ""  #: mail: who logs in
    sender: str = ""  #: mail: From
    to: list[str] = []  #: mail: who gets it
    ca: str = ""  #: file of a private CA that vouches for the receiver

    def __post_init__(self) -> None:
        schemes = _SCHEMES.get(self.kind, ("http://", "https://"))
        if not _REFERENCE.fullmatch(self.url) and not self.url.startswith(schemes):
            raise ValueError(
                f"receiver {self.name}: url must begin with {' or '.join(schemes)}, env: or file:"
            )
        if self.kind == "mail" and not (self.sender and self.to):
            raise ValueError(f"receiver {self.name}: mail needs sender and to")
        if self.kind == "pagerduty" and not self.secret:
            raise ValueError(f"receiver {self.name}: pagerduty needs its routing key as secret")


class Level(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `[[route.escalate]]`: who is told if nobody has acknowledged by then."""

    after_s: float
    receivers: list[str]

    def __post_init__(self) -> None:
        if self.after_s <= 0:
            raise ValueError("escalate: after_s must be more than 0")


class Route(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `[[route]]`: the first one that fits an incident is its route."""

    name: str
    receivers: list[str] = []  #: none: whatever fits here is told to nobody
    severity_min: str = "warning"
    match: dict[str, str] = {}  #: label -> pattern (* and ?); several apart by spaces
    group_by: list[str] = msgspec.field(
        default_factory=lambda: ["incident"]
    )  #: incidents that are alike in these are told together
    wait_s: float = 0.0  #: so long others of the group are waited for
    again_s: float = 300.0  #: between two words on a group that grows
    escalate: list[Level] = []

    def __post_init__(self) -> None:
        if unknown := {*self.match, *self.group_by} - set(LABELS):
            raise ValueError(
                f"route {self.name}: no label {', '.join(sorted(unknown))}; there are {', '.join(LABELS)}"
            )
        if self.severity_min not in SEVERITIES:
            raise ValueError(f"route {self.name}: severity_min is one of {', '.join(SEVERITIES)}")
        if not self.group_by or self.wait_s < 0 or self.again_s < 0:
            raise ValueError(
                f"route {self.name}: group_by must name a label, wait_s and again_s be 0 or more"
            )

    def fits(self, labels: Labels) -> bool:
        """Is that for this route?"""
        weighs = SEVERITIES.index(labels["severity"]) >= SEVERITIES.index(self.severity_min)
        return weighs and matches(self.match, labels)

    def group(self, labels: Labels) -> tuple[str, ...]:
        """What incidents have in common that are told together."""
        return (self.name, *(labels[name] for name in self.group_by))


class Owner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An `[[owner]]`: whose the jobs of these names are; the first one that fits counts."""

    job: str
    owner: str


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """notify.toml"""

    receiver: list[Receiver] = []
    route: list[Route] = []
    owner: list[Owner] = []

    def __post_init__(self) -> None:
        names = [receiver.name for receiver in self.receiver]
        for what, found in (("receiver", names), ("route", [route.name for route in self.route])):
            if twice := sorted({name for name in found if found.count(name) > 1}):
                raise ValueError(f"{what} {', '.join(twice)} stands in it twice")
        for route in self.route:
            told = [*route.receivers, *(name for level in route.escalate for name in level.receivers)]
            if unknown := sorted(set(told) - set(names)):
                raise ValueError(f"route {route.name}: there is no receiver {', '.join(unknown)}")

    def route_of(self, labels: Labels) -> Route | None:
        """The route of an incident; None: nobody is told."""
        return next((route for route in self.route if route.fits(labels)), None)

    def owner_of(self, job: str) -> str:
        """Whose a job is; "" if nobody says."""
        return next((its.owner for its in self.owner if job and fnmatchcase(job, its.job)), "")

    def named(self, name: str) -> Receiver | None:
        return next((receiver for receiver in self.receiver if receiver.name == name), None)


def matches(patterns: dict[str, str], labels: Labels) -> bool:
    """Does each label have one of its patterns?"""
    return all(
        any(fnmatchcase(labels[name], pattern) for pattern in some.split()) for name, some in patterns.items()
    )


def load(path: Path) -> Config:
    """What a site has written; nobody is told anything where there is no file. Raises `ConfigError`."""
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Config)
    except FileNotFoundError:
        return Config()
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from None
