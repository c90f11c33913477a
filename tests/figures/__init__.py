"""Figures of the code's size, as quoted in issue reports and benchmarks/results/figures.md."""
