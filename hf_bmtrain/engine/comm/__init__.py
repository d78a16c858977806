"""Communication of flat tensors and of Python objects between ranks, and the layouts and memory that it needs.

Nothing here depends on modules, parameters or optimizers.
"""
