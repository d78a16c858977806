"""Tensor parallelism: in a group of consecutive ranks, each rank computes with its part of the layers' weights.

Files: `groups` divides the ranks into groups, and defines which ranks shard a parameter and average its gradient.
`storage` converts between parts and the whole tensors of checkpoints. `layers` has BMTrain's layers, and `functions`
has their collectives. `plan` splits models of transformers by their tensor-parallel plans. `same_rows` finds parameters
with a wrong `tp_mode`. `refuse` refuses models without layers to split. The loss is in `features/loss/parallel.py`.

Convention: the ranks of a group compute one loss together. Each tensor in this computation is of one of two kinds: it
is equal on all ranks of the group, and so is its gradient; or each rank has a part of its rows or features, and the
gradient of this part.

There are three kinds of parameters:

* Parts of split weights. The gradient is averaged over the groups.
* Parameters that are not split and have `tp_mode=True`: all ranks of a group use them for the same rows. The gradient
  is averaged over all ranks.
* All others: each rank of a group uses them for different rows. The gradient is summed over the ranks of each group,
  and averaged over the groups.
"""
