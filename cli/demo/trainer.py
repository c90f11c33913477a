"""One process of the trainer: real training with tensor parallelism, fp32 master weights, and AdamW."""

from __future__ import annotations

import math
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

import refitd
from refitd_cli.demo import data
from refitd_cli.demo.member import (
    COMMAND_TIMEOUT_S,
    MODEL_NAME,
    Channel,
    DemoProcess,
    Message,
    join,
    reporting,
    write_state,
)
from refitd_cli.demo.model import DemoModel, compute_dtype, initialise
from refitd_cli.demo.mxfp8 import PATTERN

BATCH, SEQUENCE = 8, 128
PEAK_RATE, WARMUP_STEPS = 7e-4, 5
PRIOR_BYTES = 1 << 16  # text that is counted before the first step
MAX_GRAD_NORM = 1.0


class Trainer:
    """The model's shard of this rank, and the inputs of a step."""

    def __init__(self, member: DemoProcess, corpus: data.Corpus) -> None:
        self.layout, self.comm, self.everyone = member.layout, member.comm, member.everyone
        self.corpus = corpus
        self.dtype = compute_dtype()
        self.model = DemoModel(member.config, member.layout, member.comm)
        initialise(self.model, member.seed)
        first = torch.from_numpy(corpus.train[:PRIOR_BYTES].astype(np.int64))
        self.model.output_layer.count(first)
        self.weights = list(self.model.parameters())
        self.masters = [weight.detach().float() for weight in self.weights]
        self.optimizer = torch.optim.AdamW(self.masters, lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
        self.steps = 0

    def step(self) -> float:
        """Train on one batch and return its loss, equal on every rank."""
        text = torch.from_numpy(self.corpus.batch(self.steps, BATCH, SEQUENCE))
        tokens, targets = text[:, :-1], text[:, 1:]
        logits = self.model(tokens, dtype=self.dtype)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        self._update()
        self.model.output_layer.count(targets)
        self.model.tokens_seen += targets.numel()
        self.steps += 1
        return loss.item()

    @torch.no_grad()
    def _update(self) -> None:
        grads = []
        for weight, master in zip(self.weights, self.masters, strict=True):
            if weight.grad is None:
                raise RuntimeError("a parameter took no part in the loss")
            master.grad = weight.grad.float()
            grads.append(master.grad)
            weight.grad = None
        scale = MAX_GRAD_NORM / max(self._norm(grads), MAX_GRAD_NORM)
        torch._foreach_mul_(grads, scale)
        for group in self.optimizer.param_groups:
            group["lr"] = PEAK_RATE * min(1.0, (self.steps + 1) / WARMUP_STEPS)
        self.optimizer.step()
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)

    def _norm(self, grads: list[torch.Tensor]) -> float:
        """Return the norm of the whole model's gradient: shards are summed, replicated tensors count once."""
        split, whole = torch.zeros(1), 0.0
        for weight, grad in zip(self.weights, grads, strict=True):
            square = grad.square().sum()
            if getattr(weight, "tensor_model_parallel", False):
                split += square
            else:
                whole += square.item()
        return math.sqrt(self.comm.all_reduce(split).item() + whole)

    @torch.no_grad()
    def logits(self, size: int, length: int) -> torch.Tensor:
        """Return fp32 logits on held-out text."""
        text = torch.from_numpy(self.corpus.held_out_batch(size, length))
        logits: torch.Tensor = self.model(text[:, :-1], dtype=torch.float32)
        return logits


def train(trainer: Trainer, channel: Channel, command: Message) -> None:
    """Take command["steps"] steps, fewer if command["seconds"] pass first, at least one; report their mean loss."""
    losses = []
    deadline = time.monotonic() + command["seconds"]
    for left in range(command["steps"], 0, -1):
        begun = time.monotonic()
        losses.append(trainer.step())
        if trainer.layout.rank == 0:
            channel.emit("step", step=trainer.steps, loss=losses[-1], seconds=time.monotonic() - begun)
        # Rank 0's clock decides for all, or they would stop at different steps.
        go_on = torch.tensor([left > 1 and time.monotonic() < deadline], dtype=torch.uint8)
        if not trainer.everyone.broadcast(go_on, 0).item():
            break
    channel.emit("trained", steps=trainer.steps, loss=sum(losses) / len(losses))


def main(argv: list[str], channel: Channel) -> None:
    """Register with the daemon, then train, publish and check as the launcher says."""
    member = join(argv, channel)
    trainer = Trainer(member, data.load())
    with refitd.connect(member.runtime_dir, name=f"{member.name}-{member.layout.rank}", reconnect=False) as client:
        source = client.register_source(
            MODEL_NAME,
            trainer.model,
            rank=member.layout.rank,
            world_size=member.layout.world_size,
            mxfp8=refitd.MXFP8Offer((PATTERN,)) if member.memory == "mxfp8" else None,
        )
        channel.emit("ready", parameters=sum(weight.numel() for weight in trainer.weights))
        while True:
            command = channel.next(COMMAND_TIMEOUT_S)
            match command["command"]:
                case "train":
                    train(trainer, channel, command)
                case "publish":
                    begun = time.monotonic()
                    source.publish(command["version"])
                    channel.emit("published", version=command["version"], seconds=time.monotonic() - begun)
                case "check":
                    write_state(command["state"], trainer.model)
                    np.save(command["logits"], trainer.logits(command["size"], command["length"]).numpy())
                    channel.emit("checked")
                case "exit":
                    break
                case unknown:
                    raise ValueError(f"unknown command {unknown!r}")
        source.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    events = Channel()
    with reporting(events):
        main(sys.argv[1:], events)
