"""Optimizer state in host memory."""
