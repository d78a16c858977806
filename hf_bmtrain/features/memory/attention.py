"""Keep the output of attention in a block's forward, so that the block's recomputation does not run attention again.

For long sequences, attention takes a large part of a forward's time, and its output is only about as large as the
block's input. The output is kept if one operation computes attention as a whole: the operations of
`scaled_dot_product_attention` (flash, memory-efficient, cuDNN), and those that packages such as flash-attn register
with torch. They are found by name, in eager and in compiled blocks. Other implementations are recomputed: compiled
FlexAttention, whose kernel is not an operation of torch, and attention that is computed by separate products and a
softmax, as in torch's "math" and transformers' "eager" implementations.

torch's selective checkpointing (`create_selective_checkpoint_contexts`) is not used, because it requires that a
recomputation runs the same operations as the first forward. They differ if, for example, the first forward all-gathers
parameters or fills a cache and the recomputation does not. Selective checkpointing also does not allow a second
backward through the same graph. Here, a second backward recomputes attention.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch

from ...engine.base.torch_internals import TorchDispatchMode, detach_in_mode, inside_hooks, pytree, schema_of
from ...engine.blocks.recompute import Keeps, Recompute
from .meter import Stopwatch

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_ATEN = {
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention_forward",
}  # fmt: skip


@functools.cache
def _dropout_of(operator: Any) -> tuple[int, str] | None:
    """Return (position, name) of the dropout probability among the arguments of an attention operator.

    Returns (-1, "") if the operator has no dropout probability. Returns None if the operator does not compute the
    forward of attention, or if it writes to one of its arguments.
    """
    schema = schema_of(operator)
    if schema is None or schema.is_mutable:
        return None
    library, name = schema.name.split("::", 1)
    known = name in _ATEN if library == "aten" else "attn" in schema.name or "attention" in schema.name
    if not known or "backward" in name or "bwd" in name:
        return None
    found = [(n, argument.name) for n, argument in enumerate(schema.arguments) if _is_dropout(argument)]
    return found[0] if found else (-1, "")


def _is_dropout(argument: Any) -> bool:
    return "dropout" in argument.name and str(argument.type) == "float"  # `dropout_p` in torch, `p_dropout` elsewhere


def is_kept(operator: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return whether the output of this call of an operator is kept for the recomputation of the block's forward.

    Only outputs of attention without dropout are kept. With dropout, a recomputation that skipped the call would draw
    different random numbers in later calls than the first forward did.

    Args:
        operator: the operator, as `__torch_dispatch__` gets it.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    dropout = _dropout_of(operator)
    if dropout is None:
        return False
    position, name = dropout
    return not (args[position] if 0 <= position < len(args) else kwargs.get(name, 0.0))


class _Attention(TorchDispatchMode):
    """Base class of context managers that replace calls of attention: inside them, `attend` is called instead.

    Calls of attention with dropout are not replaced (see `is_kept`). Calls of attention in compiled code are replaced.
    """

    supports_higher_order_operators = True  # otherwise torch refuses to run higher-order operators inside this mode

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # lets torch.compile compile inside this mode, and lets the mode see the compiled code's operations

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_kept(function, args, kwargs):
            return self.attend(function, args, kwargs)
        return function(*args, **kwargs)

    def attend(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the output of `function(*args, **kwargs)`, a call of attention without dropout.

        Subclasses also keep this output, return a kept output instead of computing it again, or measure the call.
        """
        raise NotImplementedError


class _Keep(_Attention):
    """A context for the forward of a block that will be recomputed in the backward.

    It appends the output of each call of attention without dropout to `outputs`, from which `_Reuse` returns it in the
    recomputation.
    """

    def __init__(self, outputs: list[Any]) -> None:
        super().__init__()
        self._outputs = outputs

    def attend(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        output = function(*args, **kwargs)
        # If an argument requires a gradient, autograd saves the output for the backward of attention, so the output's
        # memory stays valid without a copy. If no argument does, this may be compiled code, in which no tensor requires
        # a gradient. Compiled code may reuse the output's memory, so copy the output.
        graph = any(isinstance(value, torch.Tensor) and value.requires_grad for value in args)
        kept = pytree.tree_map_only(torch.Tensor, detach_in_mode if graph else _copied, output)
        self._outputs.append((kept, _versions(kept)))
        return output


def _versions(output: Any) -> list[int]:
    """Return torch's counters of writes to the tensors in the output of an operator."""
    return [leaf._version for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of `tensor` with the same strides, which compiled code expects."""
    copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


class _Reuse(_Attention):
    """A context for a recomputation: each call of attention returns the output that the first forward has kept.

    These outputs are in `outputs`, in the order of the calls. Each is used once and then freed. If the forward is
    recomputed a second time, attention is computed again.
    """

    def __init__(self, outputs: list[Any]) -> None:
        super().__init__()
        self._outputs = outputs
        self._next = 0

    def __enter__(self):
        self._next = 0
        return super().__enter__()

    def attend(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        index, count = self._next, len(self._outputs)
        if index >= count:
            raise RuntimeError(
                f"Backward has recomputed a layer and reached call {index + 1} of attention ({function}), but the "
                f"layer's forward made only {count} calls whose outputs use_checkpoint keeps until the backward. An "
                "output may belong to a different call, so gradients would be wrong. Run backward in the same contexts "
                "as the forward, such as torch.nn.attention.sdpa_kernel. If the layer itself calls attention more "
                "often when it is recomputed, pass use_checkpoint=True, which recomputes attention as well."
            )
        self._next += 1
        kept, self._outputs[index] = self._outputs[index], None
        if kept is None:
            return function(*args, **kwargs)
        output, versions = kept
        if _versions(output) != versions:
            raise RuntimeError(
                f"The output of attention ({function}), which use_checkpoint keeps until the backward, was written in "
                "place after attention had returned it. Gradients would be wrong. Create a new tensor instead, for "
                "example with `output = output * gate` in place of `output.mul_(gate)`."
            )
        return output


def keep_attention() -> Contexts:
    """Return two context managers: one for a block's forward, one for the recomputation of this forward in backward.

    Called before a forward whose recomputation should not compute attention again. Inside the first context manager,
    the outputs of attention are kept. Inside the second, each call of attention returns the kept output. The two share
    a list of kept outputs, so each forward needs its own pair.
    """
    outputs: list[Any] = []
    return _Keep(outputs), _Reuse(outputs)


class AttentionMeter(_Attention):
    """Context manager that measures how many bytes the outputs of attention take, and how long attention takes.

    With use_checkpoint="auto", it tells how much memory the outputs of attention would take if they were kept, and how
    much time this would save in recomputations. It measures the calls of attention (without dropout) inside the
    context. The method `milliseconds` returns the time.

    Attributes:
        nbytes: the bytes of the outputs of all calls so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self._watches: list[Stopwatch] = []

    def attend(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        with Stopwatch(args[0].device) as watch:
            output = function(*args, **kwargs)
        self._watches.append(watch)
        self.nbytes += sum(leaf.nbytes for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))
        return output

    def milliseconds(self) -> float:
        """Return how many milliseconds the GPU took for the calls of attention. The host waits for the GPU.

        On the CPU and on the meta device nothing is timed: the result is nan, or 0 if attention was never called.
        """
        return sum(watch.milliseconds() for watch in self._watches)


class KeepAttention(Recompute):
    """Decides what backward recomputes in blocks with use_checkpoint="attention": everything except attention.

    Attention is recomputed, too, if `is_kept` returns False for it (with dropout, for example), or if the block's
    forward runs inside saved-tensor hooks, such as those of a checkpoint around the block.
    """

    def contexts(self, args: tuple, kwargs: dict[str, Any], pending: int) -> Contexts | None:
        return None if inside_hooks() else keep_attention()

    def kept_in_graph(self, args: tuple, kwargs: dict[str, Any], pending: int) -> Keeps | None:
        return is_kept
