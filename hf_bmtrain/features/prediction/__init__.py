"""Predict the GPU memory of a training step from a model's configuration, without weights, GPUs or process groups.

The code of real training steps runs on the meta device, where tensors have no values, with collectives that transfer no
data. The bytes of all tensor storages that a step allocates and frees are counted.
"""
