"""What the ranks tell each other about themselves, and the thread that finds out which of them does not come.

It knows communicators and their journals. It knows nothing of modules, parameters or optimizers.
"""
