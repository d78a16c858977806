"""Parameters in flat buffers, of which every rank stores 1/N.

This package knows flat buffers, parameters, gradients and the slots of modules, but not blocks or optimizers.
"""
