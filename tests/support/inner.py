"""What tests look at inside the library: the one place for each, so that a renamed attribute is followed once."""

from __future__ import annotations

from typing import Any

import hf_bmtrain as bmt
from hf_bmtrain.comm.peer_gather import PeerGather
from hf_bmtrain.comm.peer_reduce import PeerReduction


def state_of(block: Any) -> Any:
    """Return the BlockState of a block: its options, buffers, neighbours and recomputation."""
    return block._bmt


def peer_gather() -> PeerGather:
    """Return the communicator of a world that gathers by copies between ranks."""
    gather: Any = bmt.current_world().schedule.gather
    assert isinstance(gather, PeerGather)
    return gather


def peer_reduction() -> PeerReduction:
    """Return the reduction of blocks' gradients in a world that reduces by copies between ranks."""
    reduction: Any = bmt.current_world().schedule.blocks
    assert isinstance(reduction, PeerReduction)
    return reduction
