"""Which version is live: the state machine of a swap and the journal of its decisions."""
