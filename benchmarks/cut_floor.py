"""The state's way from source to target, held against the floor: the same bytes over one loopback connection.

Two processes, one connection, everything below in one run, taking turns:

  floor     AES-256-GCM frames, SHA-256 at both ends, out of one large block of memory into another, no torch
            objects; once with one thread an end, once with hashing in a thread of its own
  product   `send_state` and `receive_state` of gridagent.train, on the demo's model with AdamW
  TCP       the bytes, neither sealed nor hashed
  TLS       Python's TLS 1.3, AES-256-GCM; without hashes, and with SHA-256 at both ends

The clock runs from the source's start until the source knows that the target has verified everything. Prints,
asserts no speed.

usage: python benchmarks/cut_floor.py [--repetitions 7] [--megabytes 60 250 1000]
"""

import argparse
import hashlib
import multiprocessing
import os
import queue
import socket
import ssl
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gridagent.train.sealed import KeyPair, Listener, SealedSocket, connect
from gridagent.train.transfer import receive_state, send_state

CHUNK_BYTES = 4 << 20
TAG_BYTES = 16
KEY = bytes(range(32))  #: of the floor; the product makes its own keys
HANDOVER = "ho-benchmark"
#: (width, layers) of the demo's model whose parameters and AdamW moments come closest to so many megabytes.
MODELS = {60: (256, 6), 250: (536, 6), 1000: (1072, 6)}


# ------------------------------------------------------------------------------------------ the peers


class Tcp:
    """Nothing but the bytes."""

    def send(self, sock: socket.socket, block: memoryview) -> None:
        for start in range(0, len(block), CHUNK_BYTES):
            sock.sendall(block[start : start + CHUNK_BYTES])

    def receive(self, sock: socket.socket, block: memoryview) -> None:
        for start in range(0, len(block), CHUNK_BYTES):
            fill(sock, block[start : start + CHUNK_BYTES])


class HashedTcp(Tcp):
    """SHA-256 at both ends; over a TLS socket this is what a hand-over over TLS would cost."""

    def send(self, sock: socket.socket, block: memoryview) -> None:
        digest = hashlib.sha256()
        for start in range(0, len(block), CHUNK_BYTES):
            digest.update(block[start : start + CHUNK_BYTES])
            sock.sendall(block[start : start + CHUNK_BYTES])
        sock.sendall(digest.digest())

    def receive(self, sock: socket.socket, block: memoryview) -> None:
        digest = hashlib.sha256()
        for start in range(0, len(block), CHUNK_BYTES):
            fill(sock, block[start : start + CHUNK_BYTES])
            digest.update(block[start : start + CHUNK_BYTES])
        check(sock, digest)


class Floor:
    """Sealed and hashed at both ends, in `threads` threads an end (1 or 2), in reused buffers."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.sealed = memoryview(bytearray(CHUNK_BYTES + TAG_BYTES))
        self.aead = AESGCM(KEY)

    def send(self, sock: socket.socket, block: memoryview) -> None:
        digest, update, join = hasher(self.threads)
        for start in range(0, len(block), CHUNK_BYTES):
            plain = block[start : start + CHUNK_BYTES]
            update(plain)
            frame = self.sealed[: len(plain) + TAG_BYTES]
            self.aead.encrypt_into(nonce(start), plain, b"", frame)
            sock.sendall(frame)
        join()
        sock.sendall(digest.digest())

    def receive(self, sock: socket.socket, block: memoryview) -> None:
        digest, update, join = hasher(self.threads)
        for start in range(0, len(block), CHUNK_BYTES):
            plain = block[start : start + CHUNK_BYTES]
            frame = self.sealed[: len(plain) + TAG_BYTES]
            fill(sock, frame)
            self.aead.decrypt_into(nonce(start), frame, b"", plain)
            update(plain)
        join()
        check(sock, digest)


def nonce(counter: int) -> bytes:
    return struct.pack(">IQ", 0, counter)


def hasher(threads: int) -> tuple[Any, Callable[[memoryview], None], Callable[[], None]]:
    """(the hash, feed it, wait until all that was fed is in): at once, or in a thread beside."""
    digest = hashlib.sha256()
    if threads == 1:
        return digest, digest.update, lambda: None
    fed: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()

    def work() -> None:
        while (view := fed.get()) is not None:
            digest.update(view)

    thread = threading.Thread(target=work)
    thread.start()

    def join() -> None:
        fed.put(None)
        thread.join()

    return digest, fed.put, join


def fill(sock: socket.socket, view: memoryview) -> None:
    while view.nbytes:
        count = sock.recv_into(view)
        if not count:
            raise ConnectionError("the other end of the benchmark is gone")
        view = view[count:]


def check(sock: socket.socket, digest: Any) -> None:
    wanted = bytearray(digest.digest_size)
    fill(sock, memoryview(wanted))
    if wanted != digest.digest():
        raise ValueError("the hashes of the two ends differ")


PEERS: dict[str, Any] = {
    "TCP": Tcp(),
    "TCP + SHA-256": HashedTcp(),
    "TLS": Tcp(),
    "TLS + SHA-256": HashedTcp(),
    "floor, one thread": Floor(1),
    "floor, two threads": Floor(2),
}
PRODUCT = "product"
NAMES = (*PEERS, PRODUCT)


# ----------------------------------------------------------------------------------------- the two ends


def make_state(megabytes: int, seed: int) -> Any:
    """The demo's model, wide enough, with its AdamW moments and generators, as a rank holds it."""
    import torch

    from gridagent.train.state import RankState
    from gridctl.demo.train import ByteModel, Text

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    width, layers = MODELS.get(megabytes) or (round((megabytes * 1e6 / 12 / 72) ** 0.5 / 8) * 8, 6)
    model = ByteModel(width, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    state = RankState()
    for name, value in {"model": model, "optimizer": optimizer, "loader": Text(seed)}.items():
        state.register(name, value)
    return state


def certificate(folder: Path) -> Path:
    """A key and a certificate that signs itself, in one file."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "benchmark")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file = folder / "tls.pem"
    file.write_bytes(pem + made.public_bytes(serialization.Encoding.PEM))
    return file


def tls_context(file: Path, *, server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if server:
        context.load_cert_chain(file)
    else:
        context.check_hostname = False
        context.load_verify_locations(file)
    return context


class Target:
    """The receiving process: told what comes next through a pipe, answers with what it cost."""

    def __init__(self, pipe: Connection, megabytes: int, tls: Path) -> None:
        self.pipe, self.tls = pipe, tls_context(tls, server=True)
        self.state = make_state(megabytes, seed=2)
        pipe.send("made")
        self.block = memoryview(bytearray(pipe.recv()))

    def serve(self) -> None:
        while (name := self.pipe.recv()) is not None:
            cpu_s = time.process_time()
            report = self.product() if name == PRODUCT else self.peer(name)
            self.pipe.send((time.process_time() - cpu_s, report))

    def peer(self, name: str) -> dict[str, float]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.pipe.send(server.getsockname()[1])
            sock, _ = server.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if name.startswith("TLS"):
            sock = self.tls.wrap_socket(sock, server_side=True)
        with sock:
            sock.sendall(b"r")
            PEERS[name].receive(sock, self.block)
            sock.sendall(b"v")
        return {}

    def product(self) -> dict[str, float]:
        listener = Listener("127.0.0.1", HANDOVER)
        public = listener.meet(self.pipe.recv(), "state")
        self.pipe.send((public, listener.port))
        _, channel = listener.accept(30.0)
        channel.send(b"r")
        report = receive_state(channel, self.state)
        channel.send(b"v")
        channel.close()
        listener.close()
        return report.parts_ms


@dataclass
class Sample:
    """What one way of moving the state took, over all repetitions."""

    took_ms: list[float] = field(default_factory=list)
    source_cpu_ms: list[float] = field(default_factory=list)
    target_cpu_ms: list[float] = field(default_factory=list)
    parts_ms: list[dict[str, float]] = field(default_factory=list)


class Source:
    """The sending process, which holds the clock."""

    def __init__(self, pipe: Connection, megabytes: int, tls: Path) -> None:
        self.pipe, self.tls = pipe, tls_context(tls, server=False)
        self.state = make_state(megabytes, seed=1)
        self.nbytes = sum(entry.nbytes for entry in self.state.inventory())
        self.block = memoryview(bytearray(os.urandom(1 << 20) * (self.nbytes // (1 << 20) + 1)))[
            : self.nbytes
        ]
        assert pipe.recv() == "made"
        pipe.send(self.nbytes)

    def measure(self, name: str, sample: Sample) -> None:
        self.pipe.send(name)
        took_s, cpu_s, parts_ms = self.product() if name == PRODUCT else self.peer(name)
        target_cpu_s, more_ms = self.pipe.recv()
        sample.took_ms.append(took_s * 1e3)
        sample.source_cpu_ms.append(cpu_s * 1e3)
        sample.target_cpu_ms.append(target_cpu_s * 1e3)
        sample.parts_ms.append({**parts_ms, **more_ms})

    def peer(self, name: str) -> tuple[float, float, dict[str, float]]:
        sock = socket.create_connection(("127.0.0.1", self.pipe.recv()))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if name.startswith("TLS"):
            sock = self.tls.wrap_socket(sock)
        with sock:
            fill(sock, memoryview(bytearray(1)))
            began_s, cpu_s = time.perf_counter(), time.process_time()
            PEERS[name].send(sock, self.block)
            fill(sock, memoryview(bytearray(1)))
            return time.perf_counter() - began_s, time.process_time() - cpu_s, {}

    def product(self) -> tuple[float, float, dict[str, float]]:
        pair = KeyPair()
        self.pipe.send(pair.public)
        public, port = self.pipe.recv()
        channel: SealedSocket = connect("127.0.0.1", port, pair, public, HANDOVER, "state")
        channel.receive()
        began_s, cpu_s = time.perf_counter(), time.process_time()
        report = send_state(channel, self.state.inventory(), self.state.rng_entries)
        channel.receive()
        took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        channel.close()
        return took_s, cpu_s, report.parts_ms


def target_process(pipe: Connection, megabytes: int, tls: Path) -> None:
    Target(pipe, megabytes, tls).serve()


def compare(megabytes: int, repetitions: int, tls: Path) -> None:
    """Measures every way once in each round, so that a change of load meets all of them."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=target_process, args=(theirs, megabytes, tls))
    child.start()
    try:
        source = Source(ours, megabytes, tls)
        samples = {name: Sample() for name in NAMES}
        for name in NAMES:
            source.measure(name, Sample())  # pages, windows and allocators are warm afterwards
        for _ in range(repetitions):
            for name in NAMES:
                source.measure(name, samples[name])
        ours.send(None)
        child.join(30.0)
    finally:
        child.kill()
        child.join()
    show(source.nbytes, samples)


def show(nbytes: int, samples: dict[str, Sample]) -> None:
    medians = {name: statistics.median(sample.took_ms) for name, sample in samples.items()}
    floor = min(medians["floor, one thread"], medians["floor, two threads"])
    print(f"\n{nbytes / 1e6:.1f} MB, {len(samples[PRODUCT].took_ms)} rounds; floor = the faster of the two")
    print(f"{'':<19}{'median ms':>11}{'range ms':>18}{'GB/s':>6}{'x floor':>9}{'CPU ms at both ends':>21}")
    for name, sample in samples.items():
        low, high = min(sample.took_ms), max(sample.took_ms)
        print(
            f"{name:<19}{medians[name]:>11.1f}{f'{low:.1f} to {high:.1f}':>18}"
            f"{nbytes / medians[name] / 1e6:>6.2f}{medians[name] / floor:>9.2f}"
            f"{statistics.median(sample.source_cpu_ms):>14.1f}{statistics.median(sample.target_cpu_ms):>7.1f}"
        )
    parts = samples[PRODUCT].parts_ms
    named = (f"{name} {statistics.median(p[name] for p in parts):.1f}" for name in parts[0])
    print(f"parts of the product, ms: {', '.join(named)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[60, 250, 1000])
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"cut_floor: {os.cpu_count()} cores, load {load:.1f} at the start")
    with tempfile.TemporaryDirectory(prefix="g") as folder:
        tls = certificate(Path(folder))
        for megabytes in options.megabytes:
            compare(megabytes, options.repetitions, tls)


if __name__ == "__main__":
    main()
