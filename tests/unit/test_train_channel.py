"""Sealed channels: only who was met gets in, and nothing but what was sent here, in this order."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gridagent.train.sealed import KeyPair, Listener, SealedError, SealedSocket, connect

HANDOVER = "ho-1"


@contextmanager
def channel(handover: str = HANDOVER, purpose: str = "state") -> Iterator[tuple[SealedSocket, SealedSocket]]:
    """A channel made as two processes make it: (the caller's end, the listener's end)."""
    with closing(Listener("127.0.0.1", HANDOVER)) as listener:
        pair = KeyPair()
        public = listener.meet(pair.public, "state")
        near = connect(listener.host, listener.port, pair, public, handover, purpose)
        key, far = listener.accept(5.0)
        assert key == pair.public
        try:
            yield near, far
        finally:
            near.close()
            far.close()


@settings(max_examples=20)
@given(st.lists(st.binary(max_size=100), min_size=1, max_size=5))
def test_frames_arrive_both_ways(frames: list[bytes]) -> None:
    with channel() as (near, far):
        for frame in frames:
            near.send(frame)
            far.send(frame[::-1], last=True)
        assert [far.receive() for _ in frames] == frames
        assert [near.receive() for _ in frames] == [frame[::-1] for frame in frames]


@pytest.mark.parametrize(("handover", "purpose"), [("ho-2", "state"), (HANDOVER, "star")])
def test_keys_are_of_one_transfer_and_one_purpose(handover: str, purpose: str) -> None:
    with channel(handover, purpose) as (near, far):
        near.send(b"hello")
        with pytest.raises(SealedError, match="sealed for another transfer"):
            far.receive()


def forwarded(frames: list[bytes], order: list[int]) -> list[bytes]:
    """What arrives if the network delivers the sealed frames in this order."""
    key, back = bytes(range(39)), bytes(range(1, 40))
    with socket.create_server(("127.0.0.1", 0)) as server:
        near, out = socket.create_connection(server.getsockname()), server.accept()[0]
        put, far = socket.create_connection(server.getsockname()), server.accept()[0]
    with near, out, put, far:
        sender = SealedSocket(near, key, back, HANDOVER)
        sealed = [out.recv(sender.send(frame), socket.MSG_WAITALL) for frame in frames]
        for index in order:
            put.sendall(sealed[index])
        put.shutdown(socket.SHUT_WR)
        receiver = SealedSocket(far, back, key, HANDOVER)
        return [receiver.receive() for _ in order]


@pytest.mark.parametrize(
    "order", [[1, 0], [0, 0], [0, 2], [1]], ids=["swapped", "repeated", "dropped", "late"]
)
def test_order_is_part_of_the_seal(order: list[int]) -> None:
    frames = [b"a", b"b", b"c"]
    assert forwarded(frames, [0, 1, 2]) == frames
    with pytest.raises(SealedError, match="changed, repeated, reordered"):
        forwarded(frames, order)


def test_a_closed_peer_is_told_from_a_silent_one() -> None:
    with channel() as (near, far):
        far.settimeout(0.05)
        with pytest.raises(SealedError):
            far.receive()
        far.settimeout(5.0)
        near.close()
        with pytest.raises(SealedError, match="closed the channel"):
            far.receive()


def test_strangers_do_not_keep_the_met_peer_out() -> None:
    with closing(Listener("127.0.0.1", HANDOVER)) as listener:
        with socket.create_connection((listener.host, listener.port)) as stranger:
            stranger.sendall(b"x" * 32)
            pair = KeyPair()
            public = listener.meet(pair.public, "state")
            made: list[SealedSocket] = []
            caller = threading.Thread(
                target=lambda: made.append(
                    connect(listener.host, listener.port, pair, public, HANDOVER, "state")
                )
            )
            caller.start()
            _, far = listener.accept(5.0)
            caller.join()
            assert stranger.recv(1) == b""
        made[0].send(b"it is me")
        assert far.receive() == b"it is me"
        far.close()
        made[0].close()


def test_nobody_comes() -> None:
    with closing(Listener("127.0.0.1", HANDOVER)) as listener, pytest.raises(SealedError, match="in time"):
        listener.accept(0.05)


def test_a_useless_public_key_is_refused() -> None:
    with pytest.raises(SealedError, match="not usable"):
        KeyPair().derive(bytes(32), HANDOVER, "state")
