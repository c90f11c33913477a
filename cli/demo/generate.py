"""Text generation, one token at a time, over a model that may be cut into stages."""

from __future__ import annotations

import torch
import torch.distributed as dist

from refitd_cli.demo.data import NEW_TOKENS, PROMPT
from refitd_cli.demo.model import DemoModel, KVCache, compute_dtype

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
        """What has been generated after the prompt."""
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
