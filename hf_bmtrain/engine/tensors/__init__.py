"""Sharded tensors, of which each rank stores some elements, and which torch's functions treat as the full tensor.

A sharded tensor has the shape of the full tensor, but its memory is 1-D and holds only this rank's elements. The code
here does not decide how parameters are packed into flat buffers, or when they are unsharded.
"""
