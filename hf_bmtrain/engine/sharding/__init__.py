"""Sharded parameters, stored in flat buffers of which every rank keeps 1/N.

This package contains the flat buffers, the sharded parameters, which are views of a rank's shard, their gradients, and
`Slot`, an entry of a module's `_parameters` that is set to a sharded parameter, or to the full one while a forward or
backward needs it. The package does not depend on blocks (transformer layers) or optimizers.
"""
