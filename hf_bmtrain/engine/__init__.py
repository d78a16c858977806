"""The core of the package: shards models, all-gathers parameters, reduces gradients, and updates the shards.

It works without the optional features (the folder `features`), and imports none of them.
"""
