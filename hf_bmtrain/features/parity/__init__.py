"""`check_parity` compares one training step of a sharded model with the same step in plain torch."""
