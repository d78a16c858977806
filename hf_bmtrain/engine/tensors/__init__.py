"""Sharded tensors: each rank stores some of the elements, but torch's functions act as on the full tensor.

A sharded tensor has the shape of the full tensor, but its memory is 1-D and contains only this rank's elements. This
package does not decide how parameters are packed into flat buffers, or when they are unsharded.
"""
