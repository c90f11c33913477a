"""Refits among the processes of one group: every process calls the same function at the same time (SPMD)."""
