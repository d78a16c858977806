"""This process among the ranks: its launcher, the world, and the schedule of the current step.

It knows ranks, devices, communicators, and the order in which blocks open and gradients arrive. It knows buffers,
blocks and gradients only as protocols with a few methods, and no module, parameter or optimizer.
"""
