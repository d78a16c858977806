"""Frozen parameters stored and gathered in 4 or 8 bits: nf4, fp8, and bitsandbytes' nf4."""
