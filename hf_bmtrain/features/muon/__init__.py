"""Muon over shards: momentum whose matrices are orthogonalized, each on one rank.

`optimizer` contains MuonOptimizer. `matrices` finds a model's matrices, divides them among the ranks and plans their
exchange; `exchange` sends them to their owners and back; `orthogonalize` is the arithmetic on full matrices.
"""
