"""Repeat a forward with the state that it had the first time.

A layer's forward may change buffers (running means), attributes (counters), random generators, and containers among its
arguments (a key-value cache). A recomputation must see the old state, and must leave the present state unchanged.

Files: `replay` does this for a block, around the first forward and each recomputation. `snapshot` copies and restores
the state; it also serves to repeat the forward of a whole model.
"""
