"""Utilities that concern only one process and its device. Every other folder may import them.

They compile and launch CUDA sources, allocate page-locked memory, check arguments, write files atomically, and compute
checksums. `torch_internals` collects the private names of torch that the package uses. Nothing here depends on ranks or
on sharded parameters and modules.
"""
