"""Print the table of scripts/try-megatron: python -m benchmarks.megatron_report REPORT.xml."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from xml.etree import ElementTree

HEAD = """# Megatron-Core into Hugging Face models

`scripts/try-megatron` with megatron-core {megatron}, transformers {transformers} and torch {torch}, on the CPU.
Small models of random weights in float32 (4 layers, with experts 2; 8 heads; vocabulary of 99, padded to 128).
Megatron's ranks and the daemon are processes of one machine. After the swap both models compute logits for 12
tokens; `difference` is the largest one between them, beside the largest logit; they agree within 2e-5 (and 1e-5 of the
logit). "into Megatron": the Hugging Face model is the trainer, the ranks are the engine.

| job | outcome | largest logit | difference |
| --- | --- | --- | --- |"""


def main() -> None:
    """Read pytest's report; print one row per job."""
    print(HEAD.format(**{name: version(package) for name, package in PACKAGES.items()}))
    for case in ElementTree.parse(sys.argv[1]).iter("testcase"):
        said = {found.get("name"): found.get("value") for found in case.iter("property")}
        job = re.search(r"\[(.*)\]$", case.get("name") or "")
        ended = next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "agree")
        name = (job[1] if job else "examples/megatron_trainer.py, TP2, PP2") + (
            " (into Megatron)" if "megatron_target" in (case.get("name") or "") else ""
        )
        ended = "runs" if ended == "agree" and not said else ended
        print(f"| {name} | {ended} | {said.get('largest logit', '')} | {said.get('largest difference', '')} |")


PACKAGES = {"megatron": "megatron-core", "transformers": "transformers", "torch": "torch"}

if __name__ == "__main__":
    main()
