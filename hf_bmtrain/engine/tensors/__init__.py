"""Sharded tensors, of which each rank stores some elements, and how torch's functions act on them.

A sharded tensor has the shape of the full tensor, but its memory is 1-D and holds only this rank's elements. Nothing
here depends on flat buffers, or on when full parameters are in memory.
"""
