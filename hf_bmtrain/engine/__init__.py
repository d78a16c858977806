"""The core of the package, which shards models, all-gathers parameters, reduces gradients, and updates the shards.

The engine works without the optional features (the folder `features`), and imports none of them.
"""
