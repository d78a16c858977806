"""Sharded parameters, stored in flat buffers of which every rank keeps 1/N.

This package contains the flat buffers, the sharded parameters (views of a rank's shard) and their gradients. It also
contains `Slot`, an entry of a module's `_parameters`, which is set to the full parameter while a forward or backward
needs it, and to the sharded parameter at other times. The package does not depend on blocks (transformer layers) or
optimizers.
"""
