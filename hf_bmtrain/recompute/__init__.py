"""Activation checkpointing: policy, replay, memory plan."""
