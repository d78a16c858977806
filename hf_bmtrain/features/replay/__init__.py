"""Repeat a forward so that it starts from the same state as the first time.

A layer's forward may change buffers (running means), attributes (counters), random generators, and containers among its
arguments (a key-value cache). A recomputation must start from the state before the first forward, and must leave the
current state unchanged.

The file `replay` saves and restores this state. `Replay` is for blocks: it saves the state before the first forward,
and restores it around each recomputation. `Snapshot` contains a saved state, also of a whole model. The file also finds
random generators, and reads and writes their states.
"""
