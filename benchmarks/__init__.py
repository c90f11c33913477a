"""What `scripts/bench` runs: one module per benchmark, each with `run(json_output) -> dict`."""
