"""A vLLM server with the refitd backend, as a process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Server:
    """`vllm serve`, as a process."""

    def __init__(
        self,
        folder: Path,
        work: Path,
        tp: int = 1,
        *,
        options: Sequence[str] = (),
        log: str = "vllm.log",
        **settings: object,
    ) -> None:
        """Start the server; `options` are vLLM's, `settings` are refitd's, as in docs/vllm.md."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        self._log_path = work / log
        self._log = self._log_path.open("w")
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
            *("--port", self.url.rpartition(":")[2], "--host", "127.0.0.1", "--dtype", "bfloat16", "--enforce-eager"),
            *("--skip-tokenizer-init", "--max-model-len", "256", "--tensor-parallel-size", str(tp)),
            *("--weight-transfer-config", json.dumps({"backend": "refitd"}), "--served-model-name", "policy"),
            *("--additional-config", json.dumps({"refitd": {"runtime_dir": str(work), **settings}})),
            *("--no-enable-prefix-caching", *options),
        ]
        environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, env=environment)

    @property
    def pid(self) -> int:
        """The pid of its API server."""
        return self._process.pid

    def wait(self, seconds: float = 300.0) -> None:
        """Return once the server answers.

        Raises:
            RuntimeError: the server has ended, or does not answer in time.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            time.sleep(0.5)
        raise RuntimeError(f"{self.url} does not answer; it has said:\n{self._log_path.read_text()[-3000:]}")

    def wait_for_log(self, text: str, seconds: float = 60.0) -> None:
        """Return once a line of its log matches a regular expression.

        Raises:
            RuntimeError: no line matches in time.
        """
        deadline = time.monotonic() + seconds
        while not re.search(text, self._log_path.read_text()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {text!r} in its log:\n{self._log_path.read_text()[-3000:]}")
            time.sleep(0.3)

    def tokens(self, prompt: list[int], count: int) -> list[int]:
        """Return a greedy answer, as token numbers."""
        body = {"model": "policy", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        answer = self.post("v1/completions", {**body, "return_token_ids": True, "detokenize": False})
        return list(answer["choices"][0]["token_ids"])

    def checksums(self) -> list[dict[str, str]]:
        """Return vLLM's checksums of the weights, of every worker."""
        return list(self.post("collective_rpc", {"method": "compute_weight_checksums"})["results"])

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the answer of an endpoint."""
        request = urllib.request.Request(
            f"{self.url}/{path}", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=180) as answer:
                text = answer.read()
        except urllib.error.HTTPError as exc:
            raise RuntimeError(f"{path} answered {exc.code}: {exc.read(2000).decode(errors='replace')}") from exc
        return json.loads(text) if text else None

    def has_ended(self) -> bool:
        """Whether its process has ended."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill its API server alone, as the out-of-memory killer does."""
        self._process.kill()
        self._process.wait()
        self._log.close()

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
