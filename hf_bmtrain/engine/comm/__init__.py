"""Communication of flat tensors between ranks, and the layouts and memory that it needs.

It knows ranks, flat tensors, streams and devices. It knows nothing of modules, parameters or optimizers.
"""
