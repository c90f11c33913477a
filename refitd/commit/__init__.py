"""The commit protocol of a swap: pure value machines, side by side.

Each machine is a frozen state, a table and a function of (state, event). It reads no clock and performs no IO. The
process that runs it performs the returned instructions.

- `decision`: the coordinator's machine of one swap.
- `target_state`: a daemon's machine of one target rank.
- `rank_state`: the machine of one target rank in its own process.
- `fences`: rules for ranks that return, or that serve another version than the live one.
- `lockstep`: chooses the poll where all ranks of a replica commit.
"""
