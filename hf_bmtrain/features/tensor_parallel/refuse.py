"""Refuse models and arguments of `auto_wrap` that do not work with `tp_size`."""

from __future__ import annotations

import torch

from ...engine.runtime.world import current_world
from ...engine.wrap.extension import Extension, WrapPlan
from ..options import Options
from .plan import has_parts, has_plan


class TensorParallel(Extension):
    """The part of `auto_wrap` that checks whether a model, and the other arguments, can be combined with `tp_size`.

    If `init_distributed` got `tp_size`, `auto_wrap` raises ValueError for models without layers that can be split over
    ranks, and for arguments that do not work with `tp_size`. This class also sets `Schedule.collective_layers`, because
    the split layers issue collectives in their forwards. A recomputation repeats these collectives, so all ranks must
    recompute the same forwards.

    Args:
        options: the arguments of the call of `auto_wrap`.
    """

    def __init__(self, options: Options) -> None:
        # sequence_parallel would divide the tokens of a row between consecutive ranks. But with tp_size, consecutive
        # ranks form a group that computes the same tokens with different parts of the weights.
        # quantize_frozen would shard rank 0's weights over all ranks. But rank 0 has only its own part of each split
        # weight.
        unfit = {"sequence_parallel": options.sequence_parallel > 1, "quantize_frozen": options.quantize_frozen}
        self._unfit = [name for name, asked in unfit.items() if asked]

    def admit(self, model: torch.nn.Module, late: bool) -> None:
        grid = current_world().grid
        if grid is None:
            return
        if self._unfit:
            raise ValueError(
                f"auto_wrap: {self._unfit[0]} cannot be combined with the argument tp_size of init_distributed. Leave "
                "one of them out."
            )
        if late and has_plan(model):
            raise ValueError(
                "auto_wrap: with tp_size, parameters such as LoRA adapters cannot be added to a model that is split by "
                "its tensor-parallel plan. Call init_distributed without tp_size."
            )
        if not has_parts(model) and not has_plan(model):
            raise ValueError(
                f"auto_wrap: init_distributed(tp_size={grid.size}) splits layers over {grid.size} ranks, but "
                f"{type(model).__name__} has no layers that can be split (bmt.nn.ColumnParallelLinear, "
                "RowParallelLinear, VPEmbedding), and no tensor-parallel plan of transformers. Call init_distributed "
                "without tp_size."
            )

    def connect(self, plan: WrapPlan) -> None:
        if plan.world.grid is not None:
            plan.world.schedule.collective_layers = True
