"""What every other folder may use of torch, of one device and of its memory.

The launch of CUDA sources, page-locked memory, checks of arguments, and the private names of torch. Nothing here knows
an arithmetic operation, ranks, parameters or modules.
"""
