"""The engine shards, all-gathers, computes, reduces and updates. It does not refer to any feature."""
