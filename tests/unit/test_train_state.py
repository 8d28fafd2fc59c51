"""A rank's state: its parts, its digests, what is refused, and that it comes back through a transfer."""

import functools
import random
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

from gridagent.train import transfer
from gridagent.train.damage import Damage
from gridagent.train.sealed import SealedError, SealedSocket
from gridagent.train.state import RankState, StateError, digests
from gridagent.train.transfer import Piece, TransferError, chunks, receive_state, send_state

KEY = bytes(range(39))
OTHER = bytes(range(1, 40))


class Counter:
    def __init__(self) -> None:
        self.state: dict[str, Any] = {"seen": 0, "order": (1, 2), "tensor": torch.arange(3)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def rank(seed: int, steps: int, make: Callable[[Any], torch.optim.Optimizer]) -> RankState:
    """A rank that has trained so many steps."""
    torch.manual_seed(seed)
    random.seed(seed)
    model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 2))
    optimizer = make(model.parameters())
    counter = Counter()
    state = RankState()
    objects = {"model": model, "opt": optimizer, "counter": counter, "own": {"best": 1.5, "seed": seed}}
    for name, value in objects.items():
        state.register(name, value)
    state.register("noise", torch.Generator().manual_seed(seed))
    for _ in range(steps):
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        counter.state["seen"] += 1
    return state


def move(source: RankState, target: RankState, damage: str = "") -> tuple[Any, Any]:
    """Transfers over a socket pair; (what the source returned or raised, what the target did)."""
    ends = socket.socketpair(socket.AF_UNIX)
    near, far = SealedSocket(_tcp(ends[0]), KEY, OTHER, "ho"), SealedSocket(_tcp(ends[1]), OTHER, KEY, "ho")
    spoil = Damage(damage)
    sent: list[Any] = []
    state = source.rng_entries()

    def send() -> None:
        try:
            sent.append(send_state(near, spoil.entries(source.inventory()), lambda: state, spoil.sending))
        except SealedError as error:
            sent.append(error)

    thread = threading.Thread(target=send)
    # One process has one set of global generators: the source must have read its own first.
    thread.start()
    try:
        received: Any = receive_state(far, target)
    except (TransferError, SealedError) as error:
        received = error
        far.close()
    thread.join()
    near.close()
    far.close()
    return sent[0], received


def _tcp(sock: socket.socket) -> Any:
    """A socket pair is no TCP: the one option that is set does not exist there."""

    class Quiet:
        def setsockopt(self, *_: Any) -> None: ...
        def __getattr__(self, name: str) -> Any:
            return getattr(sock, name)

    return Quiet()


MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2),
    "fused": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "sgd": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "tensor-lr": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(1e-2), foreach=False),
}


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("warm", [0, 2], ids=["cold", "warm"])
def test_a_state_arrives_whole(name: str, warm: int) -> None:
    """Also in a target whose optimizer has no state yet."""
    target = rank(2, warm, MAKE[name])
    if warm:
        target.poison()
    source = rank(1, 5, MAKE[name])
    expected = digests(source.inventory())
    sent, received = move(source, target)
    assert sent.digests == received.digests == expected
    assert digests(target.inventory()) == expected


@pytest.mark.parametrize("at", range(12))
def test_a_flipped_bit_in_any_chunk_is_found(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = rank(1, 3, MAKE["adamw"]), rank(2, 2, MAKE["adamw"])
    small = functools.partial(chunks, chunk_bytes=300)
    total = len(list(small([entry.nbytes for entry in source.inventory()])))
    monkeypatch.setattr(transfer, "chunks", small)
    number = at * (total - 1) // 11
    _, error = move(source, target, f"bit={number}")
    assert isinstance(error, TransferError)
    assert "by hash" in str(error)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ("truncate", "cut off"),
        ("manifest", "model/0.weight is float32"),
        ("moment", "opt/0/exp_avg (optimizer) is part of the rank but not in the manifest"),
        ("buffer", "model/1.running_mean (buffers) is part of the rank but not in the manifest"),
        ("rng", "rng: digest"),
        ("nan", "model/0.weight (parameters) holds NaN"),
    ],
)
def test_damage_is_named(damage: str, named: str) -> None:
    _, error = move(rank(1, 3, MAKE["adamw"]), rank(2, 2, MAKE["adamw"]), damage)
    assert named in str(error)


def test_unknown_damage_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown damage"):
        Damage("hammer")


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 20))
def test_chunks_cover_everything_once(sizes: list[int], chunk_bytes: int) -> None:
    """Held against bytes one by one."""
    made = list(chunks(sizes, chunk_bytes))
    walked = [(p.index, byte) for chunk in made for p in chunk for byte in range(p.start, p.stop)]
    assert walked == [(index, byte) for index, size in enumerate(sizes) for byte in range(size)]
    lengths = [sum(p.stop - p.start for p in chunk) for chunk in made]
    assert all(length == chunk_bytes for length in lengths[:-1])
    assert all(0 < length <= chunk_bytes for length in lengths[-1:])
    assert all(isinstance(p, Piece) and p.start < p.stop for chunk in made for p in chunk)


def test_a_digest_sees_every_bit_and_the_names() -> None:
    state = rank(1, 2, MAKE["adamw"])
    before = digests(state.inventory())
    with torch.no_grad():
        weight = state.modules["model"].get_parameter("2.bias")
        weight[0] = torch.nextafter(weight[0], torch.tensor(9.0))
    after = digests(state.inventory())
    assert [part for part in before if before[part] != after[part]] == ["parameters"]
    state.trees["own"]["more"] = None
    assert digests(state.inventory())["other"] != after["other"]


def test_what_cannot_be_registered() -> None:
    state = RankState()
    with pytest.raises(StateError, match=r"logger: a .* cannot be registered"):
        state.register("logger", sys.stdout)
    state.register("own", {})
    with pytest.raises(StateError, match="two objects"):
        state.register("own", {})


def test_blockers() -> None:
    model = nn.Linear(2, 2)
    model.anchor = torch.ones(2)
    state = RankState()
    state.register("model", model)
    model(torch.ones(1, 2)).sum().backward()

    class Workers(Counter):
        num_workers = 2

    state.register("loader", Workers())
    found = {code: (text, fatal) for code, text, fatal in state.blockers()}
    assert found.keys() == {
        "unregistered-tensor", "gradient-at-boundary", "loader-workers", "unregistered-optimizer"
    }  # fmt: skip
    assert found["unregistered-tensor"][1]
    assert "model/anchor" in found["unregistered-tensor"][0]
    assert "zero_grad" in found["gradient-at-boundary"][0]
    assert not found["loader-workers"][1]


def test_what_nobody_would_move_is_named() -> None:
    """Without the model the new process would train parameters of its own."""
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    state = RankState()
    state.register("model", one)
    state.register("optimizer", torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1))
    (found,) = state.blockers()
    assert (found[0], found[2]) == ("unregistered-model", True)
    assert "2 parameters of optimizer" in found[1]
    state.register("other", other)
    assert state.blockers() == []


def test_a_set_in_registered_state_is_named() -> None:
    state = RankState()
    state.register("own", {"seen": {1, 2}})
    with pytest.raises(StateError, match=r"own\.seen: set cannot be moved"):
        state.inventory()


class Scaled(nn.Linear):
    """A module of the script's own with numbers that it was given or has computed."""

    def __init__(self, mean: float) -> None:
        super().__init__(2, 2)
        self.mean, self.masked, self.device_index = mean, False, 3


def test_numbers_of_the_scripts_modules_are_told_to_be_compared() -> None:
    one, same, other = (RankState({"model": Scaled(mean)}).values() for mean in (0.5, 0.5, 0.25))
    assert one.keys() == {"value model.mean", "value model.masked"}
    assert one == same
    assert {name for name in one if one[name] != other[name]} == {"value model.mean"}
    assert RankState({"model": nn.Sequential(nn.Dropout(0.1), nn.Linear(2, 2))}).values() == {}


@pytest.mark.parametrize(
    "shaped",
    [
        lambda: nn.utils.spectral_norm(nn.Linear(3, 3)),
        lambda: nn.utils.weight_norm(nn.Linear(3, 3)),
        lambda: prune.l1_unstructured(nn.Linear(3, 3), "weight", 0.5),
    ],
    ids=["spectral", "weight", "prune"],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_torch_makes_anew_out_of_parameters_is_no_state(shaped: Callable[[], nn.Module]) -> None:
    module = shaped()
    state = RankState({"model": module, "optimizer": torch.optim.SGD(module.parameters(), 0.1)})
    module(torch.ones(1, 3)).sum().backward()
    state.optimizers["optimizer"].step()
    state.optimizers["optimizer"].zero_grad()
    module(torch.ones(1, 3))
    assert state.blockers() == []


def test_a_sparse_moment_is_refused_by_name() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), 0.1, momentum=0.9)
    state = RankState({"model": table, "optimizer": optimizer})
    table(torch.tensor([1])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(StateError, match="sparse_coo is part of it, which cannot be moved"):
        state.inventory()
