"""Rates and shares of the simulated fleet: data, each with its source."""

import csv
import tomllib
from functools import cache
from importlib.resources import files

import msgspec

GPU_YEAR_H = 365.25 * 24


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """How often one class of events happens, and how long a repair takes (lognormal, days)."""

    name: str
    per_1000_gpu_years: float
    repair_mu: float
    repair_sigma: float
    source: str


class Layout(msgspec.Struct, frozen=True):
    """How nodes and jobs lie."""

    gpus: int
    rack_nodes: int
    zone_racks: int
    spare_share: float
    job_shares: list[float]


class Pace(msgspec.Struct, frozen=True):
    """How often what is reported."""

    beat_s: int
    sample_s: int
    progress_s: int
    dense_s: int
    dense_probe_s: int
    observer_steps: list[int]


class Faults(msgspec.Struct, frozen=True):
    """How faults hang together, and what people do about them."""

    frailty_shape: float
    burst_share: float
    burst_s: float
    repeat_1d: float
    repeat_7d: float
    announced_share: float
    drain_s: float
    reboot_s: float
    repair_days_max: float


class Settings(msgspec.Struct, frozen=True):
    """The file fleet.toml."""

    layout: Layout
    pace: Pace
    faults: Faults


@cache
def settings() -> Settings:
    """What fleet.toml says."""
    text = files("gridctl.simulate").joinpath("data", "fleet.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), Settings)


@cache
def causes() -> dict[str, Cause]:
    """What classes.tsv says, by class."""
    text = files("gridctl.simulate").joinpath("data", "classes.tsv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
    return {
        row["class"]: Cause(
            name=row["class"],
            per_1000_gpu_years=float(row["per_1000_gpu_years"]),
            repair_mu=float(row["repair_mu"]),
            repair_sigma=float(row["repair_sigma"]),
            source=row["source"],
        )
        for row in rows
    }
