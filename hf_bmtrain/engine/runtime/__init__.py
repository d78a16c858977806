"""This process as one of the ranks: its rank and device, the communicators, the world and the monitor.

The world, the only global variable of the library, is here. It refers to the schedule of forward and backward, which is
in `blocks`. Nothing here depends on flat buffers, modules, parameters or optimizers.
"""
