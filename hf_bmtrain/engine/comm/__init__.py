"""Collectives over flat tensors and Python objects, layouts of flat buffers, and memory shared between ranks.

Nothing here depends on modules, parameters or optimizers.
"""
