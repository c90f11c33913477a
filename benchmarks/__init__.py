"""The benchmarks of `scripts/bench`: one module each, with `run(json_output) -> dict`."""
