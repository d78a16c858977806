"""Repeat a forward so that it starts from the same state as the first time.

A layer's forward may change buffers (running means), attributes (counters), random generators, and containers among its
arguments (a key-value cache). A recomputation must start from the state before the first forward, and must leave the
current state unchanged.

Files: `replay` does this for a block, around the first forward and each recomputation. `snapshot` copies and restores
the state; it is also used to repeat the forward of a complete model.
"""
