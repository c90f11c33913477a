"""One process of an inference engine: it generates text all the time and takes new weights between two tokens."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import refitd
from refitd.describe.module import describe_module
from refitd_cli.demo import data
from refitd_cli.demo.data import NEW_TOKENS, PROMPT
from refitd_cli.demo.member import COMMAND_TIMEOUT_S, MODEL_NAME, Channel, DemoProcess, join, reporting, write_tensors
from refitd_cli.demo.model import DemoModel, KVCache, compute_dtype, initialise, tensors_of
from refitd_cli.demo.mxfp8 import Quantized

TEMPERATURE = 0.8


class PipelineStage:
    """Runs this rank's stage with its neighbours; collective over the replica."""

    def __init__(self, model: DemoModel) -> None:
        self.model, self.layout = model, model.layout

    def run(self, tokens: torch.Tensor, *, dtype: torch.dtype, cache: KVCache | None = None) -> torch.Tensor | None:
        """Return logits on the last stage and None on the others. Every stage knows the tokens."""
        x = tokens
        if not self.layout.is_first_stage:
            x = torch.empty((*tokens.shape, self.model.config.hidden), dtype=dtype)
            dist.recv(x, src=self.layout.rank - self.layout.tp_size)
        out: torch.Tensor = self.model(x, dtype=dtype, cache=cache)
        if self.layout.is_last_stage:
            return out
        dist.send(out.contiguous(), dst=self.layout.rank + self.layout.tp_size)
        return None


class Generator:
    """Completes the same prompt again and again, with another seed each time."""

    def __init__(self, pipeline: PipelineStage, seed: int) -> None:
        self._pipeline = pipeline
        self._dtype = compute_dtype()
        self._random = torch.Generator().manual_seed(seed)
        self.restart()

    @property
    def text(self) -> str:
        """The tokens generated after the prompt."""
        return bytes(self._generated).decode("utf-8", "replace")

    def restart(self) -> None:
        """Start again from the prompt; discard everything computed so far."""
        self._cache = self._pipeline.model.new_cache(len(PROMPT) + NEW_TOKENS, self._dtype)
        self._next = list(PROMPT)
        self._generated: list[int] = []

    def step(self) -> int:
        """Return the next token, on the ranks that have logits; 0 on the others."""
        tokens = torch.tensor([self._next])
        logits = self._pipeline.run(tokens, dtype=self._dtype, cache=self._cache)
        if logits is None:
            return 0
        chances = torch.softmax(logits[0, -1] / TEMPERATURE, dim=-1)
        return int(torch.multinomial(chances, 1, generator=self._random).item())

    def append(self, token: int) -> bool:
        """Continue with the token the leader chose; return whether the text is complete."""
        self._generated.append(token)
        self._next = [token]
        return len(self._generated) == NEW_TOKENS


GO_ON, SETTLE = 0, 1

Fingerprint = dict[str, tuple[Any, ...]]


def fingerprint(model: torch.nn.Module) -> Fingerprint:
    """Return address, storage and strides of every tensor; a captured graph would break if any changed."""
    return {
        name: (
            tensor.data_ptr(),
            tensor.untyped_storage().data_ptr(),
            tensor.untyped_storage().nbytes(),
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
        )
        for name, tensor in tensors_of(model).items()
    }


class DemoEngine:
    """This rank's model, its registration, and the text it is generating."""

    def __init__(self, member: DemoProcess, client: refitd.Client) -> None:
        self.member, self.layout, self.channel = member, member.layout, member.channel
        self.model = DemoModel(member.config, member.layout, member.comm).requires_grad_(False)
        initialise(self.model, member.seed)
        options: dict[str, Any] = {}
        if member.memory == "arena":
            client.adopt(self.model)
            options = {"mode": "flip"}
        self.held: Mapping[str, torch.Tensor] = tensors_of(self.model)
        tensors: Any = self.model
        if member.memory == "mxfp8":
            quantized = Quantized(self.model)
            tensors, self.held = quantized.tensors, quantized.arrays()
            options = {"metadata": describe_module(self.model, self.layout.rank), "derived": quantized.derived}
        self.target = client.register_target(
            MODEL_NAME,
            tensors,
            replica=member.name,
            rank=self.layout.rank,
            world_size=self.layout.world_size,
            convert_on_send=member.memory == "mxfp8",
            **options,
        )
        self.places = fingerprint(self.model)
        self.generator = Generator(PipelineStage(self.model), member.seed)
        self.tokens = 0
        self.last_text = ""  # the newest complete one

    def serve(self) -> None:
        """Generate until the launcher sends a command. All ranks flip, and stop, before the same token."""
        while True:
            if self.target.poll(step=self.tokens) is not None:
                self._flipped()
            token = self.generator.step()
            control = GO_ON
            if self.layout.rank == self.layout.leader and self.channel.poll() is not None:
                control = SETTLE
            word = self.member.everyone.broadcast(torch.tensor([token, control]), self.layout.leader)
            token, control = word.tolist()
            self.tokens += 1
            if self.generator.append(token):
                self._finished()
            if control == SETTLE:
                self.channel.emit("settled", tokens=self.tokens)
                return

    def _flipped(self) -> None:
        text = self.last_text or self.generator.text
        self.last_text = ""
        # Keys and values in the cache were computed by the old weights.
        self.generator.restart()
        self.channel.emit(
            "flip",
            version=self.target.version,
            token=self.tokens,
            way="flip" if self.target.flips else "copy",
            paused_s=self.target.last_pause_s,
            places_unchanged=fingerprint(self.model) == self.places,
            before=text,
        )

    def _finished(self) -> None:
        self.last_text = self.generator.text
        if self.layout.rank == self.layout.leader:
            self.channel.emit("sample", version=self.target.version, text=self.last_text, tokens=self.tokens)
        self.generator.restart()


def main(argv: list[str], channel: Channel) -> None:
    """Register with the daemon, generate, and check at the end."""
    member = join(argv, channel)
    corpus = data.load()
    with (
        torch.no_grad(),
        refitd.connect(member.runtime_dir, name=f"{member.name}-{member.layout.rank}", reconnect=False) as client,
    ):
        engine = DemoEngine(member, client)
        channel.emit("ready", tensors=len(engine.places))
        engine.serve()
        while True:
            command = channel.next(COMMAND_TIMEOUT_S)
            match command["command"]:
                case "settle":
                    pass  # a rank that does not lead gets it twice
                case "check":
                    write_tensors(command["state"], engine.held)
                    text = torch.from_numpy(corpus.held_out_batch(command["size"], command["length"]))
                    logits = PipelineStage(engine.model).run(text[:, :-1], dtype=torch.float32)
                    if logits is not None and engine.layout.rank == engine.layout.leader:
                        np.save(command["logits"], logits.numpy())
                    same = fingerprint(engine.model) == engine.places
                    channel.emit("checked", version=engine.target.version, places_unchanged=same)
                case "exit":
                    break
                case unknown:
                    raise ValueError(f"unknown command {unknown!r}")
        engine.target.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    events = Channel()
    with reporting(events):
        main(sys.argv[1:], events)
