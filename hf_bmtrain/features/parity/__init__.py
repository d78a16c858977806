"""Comparisons of a sharded model with plain torch."""
