"""Parameters in flat buffers, of which every rank stores 1/N.

It knows buffers, parameters, gradients and their places in modules. It knows nothing of blocks or optimizers.
"""
