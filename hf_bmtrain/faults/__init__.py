"""Find ranks that hang, fail or issue different collectives, and gradients that are inf or nan.

`watch.py` contains the thread that monitors the other ranks. Only `bad_gradients.py` deals with parameters and
optimizers. The other files deal with processes, communicators, and collective logs, which list the operations that a
rank has issued.
"""
