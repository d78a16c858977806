"""Mixtures of experts in all ways of transformers that run on a CPU, sharded, against one process of plain torch.

As in `zoo_check`, which also says what errors are allowed. The ranks may use disjoint halves of the experts: each stack
is then used by every rank, but no row of it by two.
"""

from __future__ import annotations

from typing import Any

import torch

import hf_bmtrain as bmt
from zoo_check import LEARNING_RATE, STEPS, gradient_errors
from zoo_families import FAMILIES
from zoo_models import Family
from zoo_twin import compute_loss

IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
STACKED = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2", "deepseek_v3", "granitemoe", "phimoe",
    "ernie4_5_moe", "glm4_moe", "minimax", "qwen3_next", "nemotron_h", "minimax_m2",
)  # fmt: skip
"""Families whose experts run in each of IMPLEMENTATIONS."""
OWN = ("llama4", "jetmoe", "dbrx")
"""Families whose experts run in one way of their own."""
ROUTERS = ("gate.weight", "router.weight", "router.layer.weight")


class Halves:
    """A hook that replaces the experts that tokens are sent to by those of one half.

    rank: which half, 0 or 1; None leaves them as they are.
    """

    def __init__(self, rank: int | None) -> None:
        self.rank = rank

    def __call__(self, module: Any, args: tuple) -> tuple | None:
        if self.rank is None:
            return None
        half = module.num_experts // 2
        return (args[0], args[1] % half + self.rank * half, *args[2:])

    def watch(self, model: torch.nn.Module) -> int:
        """Register the hook on the experts of `model`, and return how many there are."""
        found = [module for module in model.modules() if hasattr(module, "_apply_gate")]
        for module in found:
            module.register_forward_pre_hook(self)
        return len(found)


def measure_experts(name: str, implementation: str | None, disjoint: bool) -> tuple[float, float]:
    """Return the largest errors of losses and of gradients, in units of what is allowed. Collective.

    implementation: None for one of OWN. disjoint: whether the ranks use disjoint halves of the experts.
    """
    family, rank, size = FAMILIES[name], bmt.rank(), bmt.world_size()
    model, twin = _build(family, implementation), _build(family, implementation)
    ours, plain = Halves(rank if disjoint else None), Halves(None)
    assert (ours.watch(model) > 0) == (plain.watch(twin) > 0) == (implementation is not None)
    bmt.auto_wrap(model)
    worst, either = (0.0, 0.0), (model, twin)
    optimizers = [torch.optim.SGD(each.parameters(), lr=LEARNING_RATE) for each in either]
    for step in range(STEPS):
        mine = compute_loss(family, model, step * size + rank)
        mine.backward()
        expected = []
        for other in range(size):
            plain.rank = other if disjoint else None
            expected.append(compute_loss(family, twin, step * size + other))
            (expected[-1] / size).backward()
        gradients = {name: parameter.gather_gradient() for name, parameter in model.named_parameters()}
        routers = [p.grad for name, p in twin.named_parameters() if name.endswith(ROUTERS)]
        assert routers and all(grad is not None and grad.any() for grad in routers)
        loss = ((mine - expected[rank]).abs() / expected[rank].abs()).item() / 1e-5
        worst = max(worst[0], loss), max(worst[1], *gradient_errors(gradients, twin).values())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return worst


def _build(family: Family, implementation: str | None) -> Any:
    model = family.build()
    if implementation is not None:
        model.set_experts_implementation(implementation)
        used = {module.config._experts_implementation for module in model.modules() if hasattr(module, "_apply_gate")}
        assert used == {implementation}
    return model
