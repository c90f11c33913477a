"""The worker sidecar process."""
