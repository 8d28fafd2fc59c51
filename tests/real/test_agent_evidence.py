"""evidence.collect at a real agent: beside everything, once for an id, fetched in parts by operators only."""

import hashlib
import io
import json
import os
import signal
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import Agent, Client, Fleet, Refused, fleet, wait_for

from gridagent import journal
from gridagent.wire import Evidence, OpStatus


@pytest.fixture
def world() -> Iterator[Fleet]:
    with fleet() as made:
        yield made


def collect(client: Client, op: str = "ev-1") -> OpStatus:
    """Without a lease: the holder is nobody."""
    return client.op(
        "evidence.collect", {"incident": "i-1"}, id=op, holder="nobody", fence=0, deadline_s=90.0
    )


def fetched(client: Client, name: str) -> bytes:
    found = b""
    while part := client.request("GET", f"/v1/evidence/{name}?offset={len(found)}"):
        found += part
    return found


def code_of(call: object, *arguments: object) -> str:
    with pytest.raises(Refused) as caught:
        call(*arguments)  # type: ignore[operator]
    return caught.value.code


def test_evidence_is_taken_without_a_lease_while_frozen_and_once_for_an_id(world: Fleet) -> None:
    agent = world.agent(config='sources = ["system"]\n').start()
    client = agent.client()
    peer = world.peer(agent, job="j", rank=0, world_size=1)
    client.post("/v1/freeze", {"scope": "fleet", "frozen": True, "who": "ann", "reason": "storm"})
    status = collect(client)
    assert status.state == "done", status.error
    told = Evidence(**{**status.value, "items": []})
    packed = fetched(client, told.id)
    assert (len(packed), hashlib.sha256(packed).hexdigest()) == (told.bytes, told.sha256)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        names = archive.getnames()
        manifest = json.loads(archive.extractfile("manifest.json").read())  # type: ignore[union-attr]
    assert {"spool.jsonl", "status.json", f"stacks/j-0-{peer.process.pid}.txt"} <= set(names)
    assert manifest["incident"] == "i-1"
    mtime = archive_of(agent, "ev-1").stat().st_mtime_ns
    assert collect(client) == status
    agent.end(signal.SIGKILL)
    client = agent.start().client()
    assert collect(client) == status
    assert archive_of(agent, "ev-1").stat().st_mtime_ns == mtime
    assert fetched(client, told.id) == packed
    done = [r.data["event"] for r in journal.read(agent.home / "ops") if r.kind == "step"]
    assert done == ["accepted", "done"]


def archive_of(agent: Agent, name: str) -> Path:
    return agent.home / "evidence" / f"{name}.tar.gz"


def test_who_may_fetch_and_what_is_no_archive(world: Fleet) -> None:
    agent = world.agent().start()
    client = agent.client()
    assert collect(client).state == "done"
    for who in ("viewer", "n1"):
        assert code_of(agent.client(who).request, "GET", "/v1/evidence/ev-1") == "forbidden"
    for path, code in (
        ("ev-2", "not-found"),
        ("..%2Fnode.key", "bad-request"),
        ("ev-1?offset=-1", "bad-request"),
        ("ev-1?offset=x", "bad-request"),
    ):
        assert code_of(client.request, "GET", f"/v1/evidence/{path}") == code
    assert client.request("GET", "/v1/evidence/ev-1?offset=99999999") == b""
    assert code_of(collect, client, "../up") == "bad-request"


@pytest.mark.parametrize(("options", "code"), [("size=64k", "disk-full"), ("ro,size=200m", "read-only")])
def test_a_full_or_read_only_disk_is_a_clear_refusal(world: Fleet, options: str, code: str) -> None:
    agent = world.agent()
    folder = agent.home / "evidence"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a file system here")
    try:
        client = agent.start().client()
        assert code_of(collect, client) == code
        assert list(journal.read(agent.home / "ops")) == []
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_an_agent_that_ends_in_it_says_so_and_the_next_one_takes_it_anew(
    world: Fleet, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    program = tmp_path / "ipmitool"
    program.write_text(f"#!/bin/sh\necho $$ > {begun}\nexec sleep 1000\n")
    program.chmod(0o755)
    path = os.environ["PATH"]
    os.environ["PATH"] = f"{tmp_path}:{path}"
    try:
        agent = world.agent().start()
    finally:
        os.environ["PATH"] = path
    client = agent.client()
    late: dict[str, Any] = {
        "id": "ev-1",
        "run": "run-1",
        "fence": 0,
        "holder": "",
        "who": "a",
        "kind": "evidence.collect",
    }
    late["args"] = {"incident": "i-1"}
    with pytest.raises(OSError, match="timed out"):
        client.post("/v1/ops", {**late, "deadline_s": 90.0}, timeout_s=3.0)
    wait_for("the program runs", lambda: begun.exists() and begun.read_text().strip())
    assert client.status().running_op == "ev-1"
    assert code_of(collect, client, "ev-2") == "busy"
    agent.end()
    pid = int(begun.read_text())
    wait_for("the program is ended too", lambda: not Path(f"/proc/{pid}").exists())
    client = agent.start().client()
    assert collect(client).state == "interrupted"
    assert collect(client, "ev-2").state == "done"
    assert not list((agent.home / "evidence").glob("*.part"))
