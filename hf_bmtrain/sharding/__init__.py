"""Parameters in flat buffers, of which every rank stores 1/N.

It knows buffers, parameters, gradients and their places in modules. It knows nothing of blocks or optimizers.

* *buffer*: parameters alike in dtype and `requires_grad` in one flat tensor. *shard*: this rank's part of it.
* *slice*: this rank's 1-D part of a parameter, a view of the shard. *whole*: a parameter in its own shape, a view of
  the full buffer. *slot*: the place in a module that holds one or the other.
* *gather*: make the wholes readable. *release*: free them.
* *collect*: take over one gradient that autograd has computed. *send*, *receive*: begin and end its reduction.
"""
