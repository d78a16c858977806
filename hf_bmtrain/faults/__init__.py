"""Detection of ranks that hang, fail or issue different collectives, and of gradients that are inf or nan.

`watch.py` has the thread that monitors the other ranks. Only `bad_gradients.py` knows of parameters and optimizers; the
other files work with communicators and their collective logs alone.
"""
