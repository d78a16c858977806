"""Communication of flat tensors between ranks, and the layouts and memory that it needs.

It knows ranks, flat tensors, streams and devices. It knows nothing of modules, parameters or optimizers.

* *communicator*: collectives among all ranks, in order: NCCL's on a stream, gloo's, or those of a single process.
* *ticket*: the promise of an asynchronous operation; `wait` makes the current stream wait for it.
* *mark*: a point in the queue of a stream; a ticket that the host can wait for, too.
* *layout*: the division of tensors, laid end to end in a flat buffer, among the ranks.
* *shard*: one rank's part of a flat buffer. *piece*: a tensor's part in one shard. *padding*: elements of no tensor.
* *gather*: assemble a full buffer from all shards. *reduce*: average flat gradients, each rank receiving its shard.
* *peer*: another rank on this host, whose memory is read and written directly.
* *mailbox*: the memory into which peers write their parts of a gradient.
"""
