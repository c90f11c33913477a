"""Refits among the processes of one group, without the service: all processes call the same functions (SPMD)."""
