"""What fits in device memory: which blocks are recomputed, and which frozen parameters stay unsharded."""
