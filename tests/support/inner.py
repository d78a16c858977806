"""What tests look at inside the library: the one place for each, so that a renamed attribute is followed once."""

from __future__ import annotations

from typing import Any

import hf_bmtrain as bmt
from hf_bmtrain.comm.peer_gather import PeerCommunicator
from hf_bmtrain.comm.peer_reduce import PeerReduction


def state_of(block: Any) -> Any:
    """Return the BlockState of a block: its options, buffers, neighbours and recomputation."""
    return block._bmt


def is_whole(buffer: Any) -> bool:
    """Return whether all elements of a ShardedBuffer have memory on this rank, not this rank's shard alone."""
    return all(whole.untyped_storage().nbytes() for whole in buffer.wholes)


def peer_gather() -> PeerCommunicator:
    """Return the communicator of a world that gathers by copies between ranks."""
    gather: Any = bmt.current_world().step.gather
    assert isinstance(gather, PeerCommunicator)
    return gather


def peer_reduction() -> PeerReduction:
    """Return the reduction of blocks' gradients in a world that reduces by copies between ranks."""
    reduction: Any = bmt.current_world().step._blocks
    assert isinstance(reduction, PeerReduction)
    return reduction
