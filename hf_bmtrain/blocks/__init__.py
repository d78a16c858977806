"""Modules that gather their parameters, compute, and reduce their gradients.

They extend the classes of users' modules in place. They know buffers, slots, the schedule and the recomputation policy,
and nothing of models, optimizers or Hugging Face.

* *block*: a layer whose parameters are whole only while its forward or backward runs.
* *block list*: blocks in execution order, each linked to its neighbours for prefetching.
* *boundary*: an identity function of autograd that reports when backward enters a block or has left it.
* *open*: with the wholes in the block's slots.
* *pending*: of a forward, recorded by autograd and not yet followed by its backward.
"""
