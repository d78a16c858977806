"""What fits in device memory: which blocks are recomputed, and which frozen parameters stay unsharded.

With "auto", which needs a GPU, steps are measured, and the ranks agree on a plan. `activations` plans
`use_checkpoint="auto"`, `residents` plans `keep_frozen="auto"`; `plan` chooses, `meter` counts what autograd saves;
`policy` says what `use_checkpoint` means for a block; `shortage` says what would take less when memory runs out.
"""

from __future__ import annotations

from ...engine.wrap.extension import Extension, WrapPlan
from ..options import Options
from .residents import apply_keep_frozen, extend_keep_frozen
from .shortage import follow_shortage


class Memory(Extension):
    """`auto_wrap(keep_frozen=)`, and the explanation of an error by which memory ran out."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def connect(self, plan: WrapPlan) -> None:
        follow_shortage(plan.model, plan.world)
        if plan.late:
            extend_keep_frozen(plan.model, plan.world)
        else:
            apply_keep_frozen(plan.model, plan.world, self._options.keep_frozen)
