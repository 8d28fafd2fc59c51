"""The demo's training script: a byte-level transformer that learns the standard library's sources.

It is an ordinary DDP or FSDP2 script; the lines that gridctl needs are marked. Run by the demo as
`gridagent exec ... -- python -m gridctl.demo.train OUT STOP --seed 7 [--fsdp]`.
"""

import argparse
import hashlib
import json
import math
import os
import random
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gridagent.train import Session  # gridctl: also makes the backend "grid" known

VOCABULARY = 256  # bytes
CONTEXT = 64
BATCH = 2
TEXT_BYTES = 4 << 20


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_a, self.norm_b = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_a(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        y: Tensor = x + self.drop(self.down(nn.functional.gelu(self.up(self.norm_b(x)))))
        return y


class ByteModel(nn.Module):
    """About 5 M parameters. `seen` counts bytes while it trains and gives the logits their prior."""

    seen: Tensor

    def __init__(self, width: int = 256, layers: int = 6, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        self.register_buffer("seen", torch.ones(VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.seen += torch.bincount(tokens.flatten(), minlength=VOCABULARY)
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x)) + (self.seen / self.seen.sum()).log()
        return logits


class Text:
    """Random windows of the text. Its state is its generator's, and how many batches it gave."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.given = 0
        data = bytearray()
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            data += path.read_bytes()
            if len(data) >= TEXT_BYTES:
                break
        self.data = torch.frombuffer(data, dtype=torch.uint8)
        self.digest = hashlib.sha256(data).hexdigest()

    def __iter__(self) -> "Text":
        return self

    def __next__(self) -> Tensor:
        starts = torch.randint(len(self.data) - CONTEXT - 1, (BATCH,), generator=self.generator)
        self.given += 1
        return torch.stack([self.data[start : start + CONTEXT + 1] for start in starts.tolist()]).long()

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.given = state["given"]


def wrap(model: ByteModel, fsdp: bool) -> nn.Module:
    """DDP, or FSDP2 with one shard group a block."""
    if not fsdp:
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def rate(step: int) -> float:
    """Warm-up, then a cosine: the factor on the learning rate."""
    return min((step + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * min(step, 2000) / 2000))


def stop_step(file: Path) -> float:
    """The step before which training stops; for ever, while nobody wrote one."""
    try:
        return int(file.read_text())
    except (FileNotFoundError, ValueError):
        return math.inf


def main() -> None:
    """Trains until the step that the stop file names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("stop", type=Path)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--fsdp", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("grid")  # gridctl: in the place of "gloo"
    rank = dist.get_rank()
    torch.manual_seed(options.seed)
    model = wrap(ByteModel(), options.fsdp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    text = Text(options.seed * 1000 + rank)
    session = Session(model=model, optimizer=optimizer, schedule=schedule, loader=text)  # gridctl
    torch.manual_seed(options.seed * 1000 + rank)
    random.seed(options.seed * 1000 + rank)
    numpy.random.seed(options.seed * 1000 + rank)
    log = (options.out / f"rank-{rank}.jsonl").open("a")
    for batch in session.batches(text):  # gridctl: in the place of `for batch in text`
        with session.attempt():  # gridctl: a step that a dead peer spoils is repeated
            logits = model(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), batch[:, 1:].reshape(-1))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if session.is_owner:  # gridctl: a warming spare writes nothing
                line = [session.step, float(loss.detach()).hex(), time.time(), os.getpid()]
                log.write(json.dumps(line) + "\n")
                log.flush()
            session.end_step(loss=loss)  # gridctl: the step boundary
        if session.is_owner and session.step >= stop_step(options.stop):
            break
    proof = session.close()  # gridctl: digests of the final state
    (options.out / f"digests-{rank}.json").write_text(json.dumps(proof))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
