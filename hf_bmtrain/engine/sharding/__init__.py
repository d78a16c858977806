"""Parameters in flat buffers, of which every rank stores 1/N.

This package contains flat buffers, parameters, gradients and the entries of modules that hold parameters. It does not
depend on blocks or optimizers.
"""
