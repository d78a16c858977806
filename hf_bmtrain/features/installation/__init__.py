"""`python -m hf_bmtrain`: print what is installed, what training would use, and what is missing.

The packages are looked up without being imported, except CuPy on a machine with GPUs.
"""
