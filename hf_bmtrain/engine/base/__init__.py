"""Utilities for one process and its device. All other folders of the package may import them.

The utilities compile CUDA sources and launch kernels, allocate page-locked memory, check arguments, write files
atomically, and compute checksums. `torch_internals` contains the private names of torch that the package uses. Nothing
in this folder depends on ranks, or on sharded parameters and modules.
"""
