"""Find this process's rank and device, and connect it to the other ranks.

The result is a `World` (in `world`), which contains the rank, the device and the communicators. Apart from caches, it
is the only global state of the package. `monitor` defines the interface of the code that watches the other ranks for
failures. Nothing here depends on flat buffers, modules, parameters or optimizers.
"""
