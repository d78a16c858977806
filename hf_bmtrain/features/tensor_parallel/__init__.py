"""Tensor parallelism: consecutive ranks compute together, each with its parts of the weights of BMTrain's layers.

`groups` divides the ranks, and says which ranks shard a part and how gradients are averaged. `storage` converts between
a part and the whole tensor of checkpoints. `layers` has the layers, and `functions` their collectives; the loss is in
`features/loss/parallel.py`. `same_rows` finds parameters that are declared wrongly.

All follow one convention. The ranks of a group compute one loss together. A tensor is either the same on all ranks of
the group, and so is its gradient; or each rank has a part of it, of rows or of features, and the part's gradient. The
gradient of a part of a weight is averaged over the groups. That of a parameter that is not split is summed over the
ranks of a group first, because each has other rows, unless it is declared with `tp_mode=True`.
"""
