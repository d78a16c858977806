"""check_parity: a comparison of one training step of a sharded model with the same step in plain torch."""
