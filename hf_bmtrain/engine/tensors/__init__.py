"""Slices: this rank's 1-D parts of whole tensors, and how torch's functions act on them.

It knows placements, whole shapes and torch's functions. It knows nothing of buffers, or of when wholes are there.
"""
