"""Muon for sharded parameters. Each matrix is orthogonalized on one rank, its owner.

Files: `optimizer` contains MuonOptimizer. `matrices` finds a model's matrices, assigns them to owners and plans their
exchange. `exchange` sends the matrices to their owners and the results back. `orthogonalize` contains the arithmetic on
full matrices.
"""
