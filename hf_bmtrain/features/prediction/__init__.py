"""Predict the memory of a training step from a model's configuration, without weights, GPUs or process groups.

The prediction runs real training steps on the meta device, with collectives that transfer no data, and counts the bytes
of all storages that a step allocates and frees.
"""
