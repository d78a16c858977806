"""Sequence parallelism, `auto_wrap(sequence_parallel=P)`: each group of P ranks shares the tokens of its rows.

A row is one sequence of a batch, which may be too long for one GPU. Each rank processes a part of its tokens. For
attention, the ranks of a group exchange queries, keys and values: each rank gets all tokens of some heads, computes
their attention with transformers' own functions and masks, and sends the results back. Parameters stay sharded over all
ranks.

Files: `choose` finds the blocks, or the reason why the model is not supported. `rows` divides inputs, labels and loss
among the ranks. `attention` is the attention function, and `exchange` its collectives. `parts` defines which tokens and
heads each rank gets. Accelerate's data loaders give the ranks of a group the same batches (`share_batches`).
"""

from __future__ import annotations

import logging

import torch

from ...engine.wrap.accelerator import divide_batches, share_batches, share_rows
from ...engine.wrap.extension import Extension, WrapPlan
from ..options import Options
from .attention import ROW, register
from .choose import attentions_of, choose_blocks, trunk_of
from .rows import SharedRows

_log = logging.getLogger("hf_bmtrain")
_ROWS = "_bmt_shared_rows"


class SequenceParallel(Extension):
    """The extension of `auto_wrap` that applies `sequence_parallel=P`: P ranks share the tokens of each sequence.

    Args:
        options: the arguments that were passed to `auto_wrap`. Only `sequence_parallel` and `use_checkpoint` are used.
    """

    def __init__(self, options: Options) -> None:
        self._size, self._plans = options.sequence_parallel, options.use_checkpoint == "auto"
        self._blocks: list[torch.nn.Module] = []

    def choose(self, plan: WrapPlan) -> None:
        if self._size == 1:
            return
        if plan.world.size % self._size:
            raise ValueError(
                f"auto_wrap: sequence_parallel={self._size} must divide the number of ranks, {plan.world.size}. Pass a "
                "divisor of this number, or start a different number of ranks."
            )
        self._blocks = choose_blocks(plan.model, plan.layers)

    def prepare(self, plan: WrapPlan) -> None:
        for block in self._blocks:
            for attention in attentions_of(block):
                setattr(attention, ROW, None)
                config = attention.config
                config._attn_implementation_internal = register(config._attn_implementation)

    def connect(self, plan: WrapPlan) -> None:
        rows = getattr(plan.model, _ROWS, None)
        if plan.late and rows is not None:
            rows.follow(plan.model)
        if not self._blocks:
            # Undo what an earlier model with sequence parallelism has changed in Accelerate's data loaders. There are
            # two exceptions. With `tp_size` (`grid` is not None), the ranks of a tensor-parallel group may need the
            # same batches, too. A memory prediction (on the meta device) reads no data, and leaves Accelerate as it is.
            if not plan.late and plan.world.grid is None and plan.world.device.type != "meta":
                divide_batches(plan.model, plan.world)
            return
        if self._plans and getattr(plan.model, "_uneven", False):
            raise ValueError(
                "auto_wrap: with sequence_parallel, use_checkpoint='auto' does not support "
                f"{type(plan.model).__name__}, because the ranks may run different parts of this model. Pass "
                "use_checkpoint=True or use_checkpoint=False."
            )
        rows = SharedRows(plan.model, self._size)
        rows.watch(self._blocks, trunk_of(plan.model, self._blocks[0]))
        setattr(plan.model, _ROWS, rows)
        share_rows(plan.model, self._size)
        plan.world.schedule.collective_layers = True
        if plan.world.device.type == "meta":  # a memory prediction on the meta device, which reads no data
            return
        share_batches(plan.model, plan.world)
        if plan.world.rank == 0:
            inner = register(attentions_of(self._blocks[0])[0].config._attn_implementation)
            _log.info(
                "sequence_parallel: in each of %d groups, %d ranks share the tokens of a row; in attention (%s), each "
                "rank computes some of the heads. This applies to %d of %d blocks",
                plan.world.size // self._size, self._size, inner, len(self._blocks), len(plan.layers),
            )  # fmt: skip
