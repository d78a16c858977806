"""auto_wrap(mlp_chunks=N): the MLP of each block processes its tokens in N chunks, one after another.

When long sequences are trained with recomputation, the intermediate activations of a single MLP make up most of the
peak memory: several tensors of shape (tokens, intermediate size). With N chunks, these tensors take 1/N of that memory.
The tensors are not kept until backward, which recomputes each chunk. With use_checkpoint=True the number of operations
stays the same if the MLP is the last part of the block, because the recomputation of the block then stops before the
MLP. Gradients of weights are summed over the chunks in float32 (float64 weights: in float64).

This file finds the MLPs, and `chunked` contains their forward and backward.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from ...engine.blocks.sharded_module import extend_module
from ...engine.wrap.extension import Extension, WrapPlan
from ..options import Options
from .chunked import ChunkedMlp

_MIXES = {"flatten", "movedim", "mT", "permute", "swapaxes", "transpose"}
"""If the code of a forward has one of these names, the forward may mix tokens with features."""
_log = logging.getLogger("hf_bmtrain")


class MlpChunks(Extension):
    """The part of `auto_wrap` that applies `mlp_chunks=N`: makes MLPs in blocks compute their tokens in N chunks.

    This saves memory. For long sequences, most of the memory at the peak is taken by the intermediate activations of
    the MLP that is computing at that moment. With N chunks they take 1/N as much.

    Args:
        options: the arguments that were passed to `auto_wrap`.
    """

    def __init__(self, options: Options) -> None:
        self._count = options.mlp_chunks
        self._found: list[torch.nn.Module] = []

    def admit(self, model: torch.nn.Module, late: bool) -> None:
        for name, module in model.named_modules() if late else ():
            if isinstance(module, ChunkedMlp) and _draws(module):
                raise ValueError(
                    f"auto_wrap: mlp_chunks={module.chunks} does not support dropout, but '{name}' got dropout after "
                    "the model was wrapped. Masks would be drawn chunk by chunk, so results would differ from those "
                    "without mlp_chunks. Create the model again, and add adapters without dropout (lora_dropout=0), or "
                    "wrap it without mlp_chunks."
                )

    def choose(self, plan: WrapPlan) -> None:
        if self._count == 1:
            return
        if plan.compiled:
            raise ValueError(
                "auto_wrap: compile cannot be combined with mlp_chunks, because torch.compile cannot trace how an MLP "
                "computes its gradients in chunks. Leave one of them out."
            )
        inside = (module for layer in plan.layers for module in layer.modules())
        self._found = [module for module in inside if _is_mlp(module, plan.shared)]
        if not self._found:
            raise ValueError(
                f"auto_wrap: mlp_chunks={self._count} finds no MLP in the blocks of {type(plan.model).__name__} that "
                "can be computed in chunks. The name of its class must end in MLP. It must take one tensor, must not "
                "transpose it, must have no dropout, batch normalization, convolution or router, and must share no "
                "weights with other modules. Leave mlp_chunks out."
            )

    def prepare(self, plan: WrapPlan) -> None:
        for module in self._found:
            extend_module(module, ChunkedMlp, chunks=self._count)
        if self._found and plan.world.rank == 0:
            kind = type(self._found[0]).__name__
            _log.info(
                "mlp_chunks=%d: each MLP in the blocks processes its tokens in that many chunks (%d MLPs, such as %s)",
                self._count, len(self._found), kind,
            )  # fmt: skip


def _is_mlp(module: torch.nn.Module, shared: set[int]) -> bool:
    """Return whether `module` is an MLP that can process its tokens in chunks.

    The name of its class must end in MLP, and the module must take one tensor, use no dropout and share no parameters
    with other modules. Modules that mix tokens are left out: those that normalize over the batch, are convolutions, or
    transpose their input. Modules with a router are left out, because their experts may accept only a limited number of
    tokens of a sequence, and because hooks that record the router's outputs need the outputs of all tokens at once.

    shared: the ids of parameters that several modules use.
    """
    if not type(module).__name__.endswith("MLP"):
        return False
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    if (
        len(inspect.signature(module.forward).parameters) != 1
        or code is None
        or _calls_dropout(code.co_names, module)
        or not _MIXES.isdisjoint(code.co_names)
    ):
        return False
    if any(isinstance(each, (_NormBase, _ConvNd)) for each in module.modules()):
        return False
    if _draws(module) or any("Router" in type(each).__name__ for each in module.children()):
        return False
    return not any(id(parameter) in shared for parameter in module.parameters())


def _calls_dropout(names: Sequence[str], module: torch.nn.Module) -> bool:
    """Return whether the forward of `module` seems to call the function torch.nn.functional.dropout.

    Calls of a submodule that is named `dropout` do not count.

    names: the names of globals and attributes that the code of this forward uses.
    """
    return "dropout" in names and ("functional" in names or not hasattr(module, "dropout"))


def _draws(module: torch.nn.Module) -> bool:
    """Return whether `module` contains dropout with a probability above zero, which draws random numbers."""
    return any(isinstance(each, torch.nn.modules.dropout._DropoutNd) and each.p > 0 for each in module.modules())
