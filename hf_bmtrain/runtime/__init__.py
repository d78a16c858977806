"""This process among the ranks: its launcher, the world, and the schedule of the current step.

It knows ranks, devices, communicators, and the order in which blocks open and gradients arrive. It knows buffers,
blocks and gradients only as protocols with a few methods, and no module, parameter or optimizer.

* *world*: the ranks that train together, as one of them sees them; the only global of the library.
* *schedule*: decides when blocks are released and gradients received.
* *forward pass*: one call of the outermost sharded module. Its backward begins at its outputs.
* *member*: takes part in a running backward and is closed at its end.
* *prefetch*: start the gather of the block that runs next.
* *quiesce*: wait until no rank reads this rank's shards, so that they may be written.
"""
