"""The commands: `refitd` runs the daemon and the coordinator, `refitctl` is the operator's hand."""
