"""The transports that move bytes: one file per backend, behind one small interface."""
