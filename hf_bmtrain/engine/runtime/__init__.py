"""Find this process's rank and device, and connect it to the other ranks.

`world.World` holds the result: the rank, the device, and the communicators. The world of a process is the only global
variable of the package. `monitor` is the interface of the code that watches the other ranks for failures. Nothing here
depends on flat buffers, modules, parameters or optimizers.
"""
