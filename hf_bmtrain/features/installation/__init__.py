"""`python -m hf_bmtrain`: print what is installed, what training would use, and what is missing.

The versions of packages are read from their metadata, so that packages such as transformers need not be imported. On
a machine with GPUs, CuPy is imported to check that it works.
"""
