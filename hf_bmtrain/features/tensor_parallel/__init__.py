"""Tensor parallelism: in a group of consecutive ranks, each rank computes with its part of the layers' weights.

Files: `groups` divides the ranks into groups, and defines which ranks shard a parameter and average its gradient.
`storage` converts between parts and the whole tensors of checkpoints. `layers` has BMTrain's layers, and `functions`
has their collectives. `plan` splits models from transformers by their tensor-parallel plans, and refuses models without
layers to split. `same_rows` finds parameters with a wrong `tp_mode`. The loss is in `features/loss/parallel.py`.

The ranks of a group compute one loss together. Each tensor in this computation is of one of two kinds:

* The tensor is equal on all ranks of the group, and its gradient is too.
* Each rank has a part of the tensor's rows (dimension 0) or features (last dimension), and the gradient of this part.

There are three kinds of parameters:

* Parts of split weights. The gradient of a part is averaged over the groups.
* Parameters that are not split and have `tp_mode=True`. All ranks of a group use such a parameter for the same rows.
  Its gradient is averaged over all ranks.
* All other parameters. Each rank of a group uses such a parameter for different rows, or for different features of the
  same rows. (An example is the weight of a norm that is applied to each attention head.) Its gradient is summed over
  the ranks of each group, and averaged over the groups.
"""
