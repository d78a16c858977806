"""Any `nn.Module` in, sharded in place."""
