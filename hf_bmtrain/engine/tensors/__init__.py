"""Sharded tensors: each rank stores some of a tensor's elements, and torch's functions work on the whole tensor.

A sharded tensor has the shape of the full tensor, but its memory is 1-D and holds only this rank's elements. This
package knows neither flat buffers nor when full parameters are in memory.
"""
