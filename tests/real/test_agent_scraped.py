"""A real agent's page, judged by Prometheus: promtool checks it, and a server scrapes it over mutual TLS."""

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import Agent, Fleet, fleet, free_port, wait_for

pytestmark = pytest.mark.skipif(
    not (shutil.which("promtool") and shutil.which("prometheus")),
    reason="promtool and prometheus are missing: apt-get install prometheus",
)
#: DCGM's exporter calls a label "modelName" and a metric ..._COUNTER.
DCGMS_OWN = ("label names should be written in 'snake_case' not 'camelCase'", "include type 'counter'")
HEADER = {
    "recording": 1,
    "name": "page",
    "start": "2026-11-01T00:00:00Z",
    "interval_s": 1.0,
    "nodes": [{"name": "n1"}],
    "jobs": [],
}
HOSTILE = 'disk:/mnt/a"b\\c\nd{e="f"} 7 é\u2028'
GPU = {"temp_c": 61.5, "util_pct": 97, "ecc_sbe_total": 9, "mem_used_mib": 70_000, "throttle": 4, "lost": 0}
DEVICES = {
    "gpu:3": {**GPU, "pcie_replay_total": 2, "remap_pending": 0, "sm_clock_mhz": 1980, "nvlink_crc_total": 0},
    "nic:mlx5_0/1": {"state": 1, "rate_gbps": 400, "rx_bytes_total": 12345, "link_downed_total": 1},
    "psu:0": {"in_w": 900, "in_v": 230, "ok": 1},
    "node": {"load1": 3.5, "uptime_s": 86400, "mem_avail_mib": 1000, "aer_cor_total": 4},
    HOSTILE: {"free_mib": 5, "inodes_free": 6, "read_only": 0},
}


@pytest.fixture
def world() -> Iterator[Fleet]:
    with fleet() as made:
        yield made


@pytest.fixture
def agent(world: Fleet) -> Agent:
    """An agent that has told of every kind of device."""
    agent = world.agent(config='sources = ["replay:devices.jsonl?node=n1"]\n')
    about = {"uuid": "GPU-1", "pci": "0000:1a:00.0", "model": 'H"200'}
    lines = [
        {"t": 0.0, "node": "n1", "kind": "sample", "device": device, **about, "v": values}
        for device, values in DEVICES.items()
    ]
    (agent.home / "devices.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [HEADER, *lines]))
    agent.start()
    wait_for("the last device is on the page", lambda: "gridagent_disk_read_only" in page(agent))
    return agent


def page(agent: Agent) -> str:
    return agent.client("viewer").request("GET", "/metrics").decode()


def complaints(text: str) -> tuple[int, list[str]]:
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    return checked.returncode, (checked.stdout + checked.stderr).splitlines()


def test_promtool_finds_nothing_but_what_dcgm_calls_a_label(agent: Agent) -> None:
    text = page(agent)
    own = [line for line in text.splitlines(keepends=True) if "DCGM_" not in line]
    assert complaints("".join(own)) == (0, [])
    _, said = complaints(text)
    assert all(line.startswith("DCGM_") and line.endswith(DCGMS_OWN) for line in said), said


def ask(port: int, what: str, **query: str) -> Any:
    url = f"http://127.0.0.1:{port}/api/v1/{what}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)["data"]


def value(port: int, query: str) -> list[tuple[dict[str, str], float]]:
    found = ask(port, "query", query=query)["result"]
    return [(series["metric"], float(series["value"][1])) for series in found]


@pytest.fixture
def prometheus(agent: Agent, world: Fleet, tmp_path: Path) -> Iterator[int]:
    """The port of a real Prometheus that scrapes the agent as a viewer: it asks for OpenMetrics first."""
    trust, port = world.trust_of("viewer"), free_port()
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [
            {
                "job_name": "gridagent",
                "scheme": "https",
                "tls_config": {
                    "ca_file": str(trust / "ca.crt"),
                    "cert_file": str(trust / "operator.crt"),
                    "key_file": str(trust / "operator.key"),
                },
                "static_configs": [{"targets": [agent.url.removeprefix("https://")]}],
            }
        ],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    command = [
        "prometheus",
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stderr=log, stdout=log) as process:
        try:
            yield port
        finally:
            process.kill()


def test_a_server_scrapes_openmetrics_over_mutual_tls(prometheus: int) -> None:
    port = prometheus
    wait_for("a scrape", lambda: value(port, "up == 1"))
    (target,) = ask(port, "targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    ((labels, free),) = value(port, "gridagent_disk_free_bytes")
    assert (labels["device"], free) == (HOSTILE, 5 * 2**20)
    ((labels, temp),) = value(port, "DCGM_FI_DEV_GPU_TEMP")
    assert (labels["UUID"], labels["modelName"], labels["gpu"], temp) == ("GPU-1", 'H"200', "3", 61.5)
    assert value(port, "gridagent_nic_rx_bytes_total")[0][1] == 12345
    wait_for("its metadata", lambda: ask(port, "metadata", metric="gridagent_gpu_temp_celsius"))
    (about,) = ask(port, "metadata", metric="gridagent_gpu_temp_celsius")["gridagent_gpu_temp_celsius"]
    assert about == {"type": "gauge", "help": "Temperature.", "unit": "celsius"}  # plain text has no units
