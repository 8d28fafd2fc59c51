"""Frames sealed from scattered memory and opened into scattered memory, held against plain AES-GCM."""

import hashlib
import itertools
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from gridagent.train.sealed import TAG_BYTES, SealedError, SealedSocket
from gridagent.train.transfer import Piece, _Hashes, chunks

HANDOVER = "ho-test"
TO, BACK = bytes(range(39)), bytes(range(1, 40))


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with near, far:
        yield near, far


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    """`data` cut at these places, empty parts included."""
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:stop] for start, stop in itertools.pairwise(places)]


@settings(deadline=None, max_examples=50)
@given(
    st.binary(max_size=300),
    st.lists(st.integers(0, 300)),
    st.lists(st.integers(0, 300)),
    st.booleans(),
    st.sampled_from([1, 20, 64 << 10]),
)
def test_pieces_are_one_frame_that_plain_aes_gcm_opens(
    data: bytes, cuts: list[int], other: list[int], last: bool, gather_bytes: int
) -> None:
    with patch("gridagent.train.sealed.GATHER_BYTES", gather_bytes):
        check_frame(data, cuts, other, last)


def check_frame(data: bytes, cuts: list[int], other: list[int], last: bool) -> None:
    with pair() as (near, far):
        sent = SealedSocket(near, TO, BACK, HANDOVER).send_pieces(split(data, cuts), last=last)
        assert sent == 5 + len(data) + TAG_BYTES
        frame = far.recv(sent, socket.MSG_WAITALL)
        nonce = struct.pack(">7sIB", TO[32:39], 0, last)
        assert AESGCM(TO[:32]).decrypt(nonce, frame[5:], HANDOVER.encode()) == data
    with pair() as (near, far):
        near.sendall(frame)
        outs = [memoryview(bytearray(len(part))) for part in split(data, other)]
        assert SealedSocket(far, BACK, TO, HANDOVER).receive_pieces(outs) == len(data)
        assert b"".join(outs) == data


@pytest.mark.parametrize("where", [4, 5, 20, 104, 105, 120])
def test_a_changed_bit_is_refused(where: int) -> None:
    with pair() as (near, far), pair() as (spoiled, end):
        sealed = SealedSocket(near, TO, BACK, HANDOVER).send_pieces([b"a" * 40, b"b" * 60])
        frame = bytearray(far.recv(sealed, socket.MSG_WAITALL))
        frame[where] ^= 1
        spoiled.sendall(frame)
        with pytest.raises(SealedError):
            SealedSocket(end, BACK, TO, HANDOVER).receive_pieces([memoryview(bytearray(100))])


def test_a_frame_of_another_size_is_not_written() -> None:
    with pair() as (near, far):
        SealedSocket(near, TO, BACK, HANDOVER).send_pieces([b"abc"])
        out = memoryview(bytearray(4))
        assert SealedSocket(far, BACK, TO, HANDOVER).receive_pieces([out]) == 3
        assert bytes(out) == bytes(4)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.binary(max_size=40), min_size=1, max_size=12), st.integers(1, 30))
def test_hashes_beside_are_the_hashes(parts: list[bytes], chunk_bytes: int) -> None:
    ended: list[int] = []
    sizes = [len(part) for part in parts]
    with _Hashes(sizes, ended.append) as running:
        for chunk in chunks(sizes, chunk_bytes):
            running.feed([(p, memoryview(parts[p.index])[p.start : p.stop]) for p in chunk])
        assert running.results() == [hashlib.sha256(part).hexdigest() for part in parts]
    assert sorted(ended) == [index for index, part in enumerate(parts) if part]


def test_what_fails_beside_is_raised() -> None:
    def fail(_index: int) -> None:
        raise ArithmeticError("broken")

    with _Hashes([1, 1], fail) as running:
        running.feed([(Piece(0, 0, 1), memoryview(b"a")), (Piece(1, 0, 1), memoryview(b"b"))])
        with pytest.raises(ArithmeticError, match="broken"):
            running.results()
