"""TorchScript functions in a forward that is repeated.

TorchScript profiles the first call of a function and optimizes the second. Autograd then saves other tensors than in
the first, in another order, and a recomputation would take one for another. So nothing is optimized from the first
recomputed layer on: each function stays what it is, optimized or not.
"""

from __future__ import annotations

from ...engine.base.torch_internals import optimize_scripts


def keep_scripts() -> None:
    """Optimize no further TorchScript function in this thread."""
    optimize_scripts(False)


def ends_recomputation(error: RuntimeError) -> bool:
    """Return whether this is the exception by which torch ends a recomputation once all tensors are there.

    TorchScript turns what passes through it into a RuntimeError of its own, with the place and the message, and that
    one has no message. Torch checks afterwards that no tensor is missing.
    """
    message = str(error)
    return "TorchScript interpreter" in message and message.rstrip().endswith("RuntimeError:")
