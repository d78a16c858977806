"""Linear layers that compute in float8: their three matrix products and, if possible, the all-gathers of their weights.

Only layers in blocks (transformer layers) can use float8. Float8 speeds up layers that process thousands of tokens on
GPUs with float8 matrix products (Ada, Hopper, Blackwell). On a CPU it is emulated, which is slow. Embeddings, the head,
norms, attention, routers and adapters compute in their own dtype. The rounding noise of each layer is measured when
training begins, and layers with too much noise stop using float8. `auto_wrap(float8=True)` raises an error for a model
in which no layer can use float8, and for a model that was wrapped without float8 before.

Files: `arithmetic` rounds and multiplies; `linear` is the layer; `choose` selects the layers; `calibrate` measures
their noise; `storage` stores weights and all-gathers them in float8; `gather` selects the weights for `storage`.
"""

from __future__ import annotations

import torch

from ...engine.sharding.storage import PLAIN, StorageKind
from ...engine.wrap.extension import Extension, WrapPlan
from ...engine.wrap.find import adapter_parameters
from ..options import Options
from .calibrate import float8_states, install_signal_guard
from .choose import apply_float8, check_late_float8, choose_float8
from .gather import check_adapted_float8, choose_gathered, gather_in_own_dtype, link_layers
from .storage import Float8Kind


class Float8(Extension):
    """The part of `auto_wrap` that makes linear layers in blocks compute in float8.

    It changes layers only if the argument `float8` of `auto_wrap` is True (or the synonym "rows"). The argument `keep`
    names modules whose layers continue to compute in their own dtype.

    Args:
        options: the arguments that were passed to `auto_wrap`. Only `float8` and `keep` are used.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._linears: dict[str, torch.nn.Module] = {}  # the layers that will compute in float8, by path
        self._gathered: set[int] = set()  # ids of the weights that may be all-gathered in float8

    def admit(self, model: torch.nn.Module, late: bool) -> None:
        if late:
            check_late_float8(model, self._options.float8)
            check_adapted_float8(model)

    def choose(self, plan: WrapPlan) -> None:
        options = self._options
        self._linears = choose_float8(plan.model, plan.layers, plan.world.device, options.float8, options.keep)

    def prepare(self, plan: WrapPlan) -> None:
        apply_float8(self._linears)
        self._gathered = choose_gathered(plan.model, self._linears.values(), plan.world)

    def kind(self, parameter: torch.nn.Parameter) -> StorageKind | None:
        brings_its_own = getattr(parameter, "storage_kind", PLAIN) != PLAIN
        return Float8Kind() if id(parameter) in self._gathered and not brings_its_own else None

    def connect(self, plan: WrapPlan) -> None:
        if plan.late:
            if adapter_parameters(plan.model):
                gather_in_own_dtype(float8_states(plan.model).values())
        else:
            link_layers(self._linears.values())
            install_signal_guard(plan.model, self._linears, plan.layers, plan.world)
