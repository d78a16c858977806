"""Repeat a forward so that it starts from the same state as the first time.

A layer's forward may change buffers (running means), attributes (counters), random generators, and containers among its
arguments (a key-value cache). A recomputation must start from the state before the first forward, and must leave the
current state unchanged.

The file `replay` saves and restores this state. `Replay` does so for a block, around the first forward and each
recomputation. `Snapshot` also does so for a model. The file also finds random generators, and reads and writes their
states.
"""
