"""Predict the memory of a training step from a model's configuration, without weights, GPUs or process groups.

The prediction runs the engine itself on the meta device, in a world whose communicators move no data, and counts the
bytes of all storages that the step allocates and frees.
"""
