"""How bytes move: one file per backend, behind one small interface."""
