"""Sharded parameters, stored in flat buffers of which every rank keeps 1/N.

This package contains the flat buffers, the parameters that are views of them, their gradients, and the slots: the
entries of modules' `_parameters` that are set to these parameters. It does not depend on blocks or optimizers.
"""
