"""`python -m hf_bmtrain`: what is installed, what training would use, and what is missing.

It imports none of the packages that it looks for, except CuPy on a machine with GPUs.
"""
