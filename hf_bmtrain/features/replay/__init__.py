"""Repeat a forward so that it starts from the same state as the first time.

A layer's forward may change buffers (running means), attributes (counters), random generators, and containers among its
arguments (a key-value cache). A recomputation must start from the state before the first forward, and must leave the
current state unchanged.

Files: `replay` saves and restores the state of a block, around the first forward and each recomputation, or of a whole
model. `generators` finds random generators, and reads and writes their states.
"""
