"""The engine: it shards, all-gathers, computes, reduces and updates. It names no feature."""
