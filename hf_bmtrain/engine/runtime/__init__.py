"""This process as one of the ranks: its rank and device, the communicators to the other ranks, the world, the monitor.

The only global variable of the library, the world, is here. The world refers to the schedule of forward and backward,
which is in `blocks`. Nothing here depends on flat buffers, modules, parameters or optimizers.
"""
