"""Sharded tensors: each rank stores some of a tensor's elements, and torch's functions work on the full tensor.

A sharded tensor has the shape of the full tensor, but its memory is 1-D and holds only this rank's elements. This
package does not depend on how parameters are packed into flat buffers, or on when they are unsharded.
"""
