"""RouterLoad, which counts on the device how many tokens each expert gets, and averages the routers' auxiliary loss."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch

from ...engine.base.torch_internals import foreach_zero_
from ...engine.blocks.observer import Observer
from ...engine.runtime.world import World, current_world

_log = logging.getLogger("hf_bmtrain")


class RouterLoad(Observer):
    """Counts how many tokens a model's routers send to each expert in training, from its creation until `close`.

    The counts stay on the device until `read`, the only method that waits for the GPU. Counting adds one kernel per
    layer of experts to each forward. This kernel also runs in evaluation and after `close`, but counts nothing then.
    Recomputations are not counted. Only experts that have the interface of transformers' experts are counted.

    Args:
        model: the wrapped model, to which hooks are added.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        world = current_world()
        self._model = weakref.ref(model)
        self._switch, self._counters = _counters_of(model, world)
        self._loss = torch.zeros((), dtype=torch.float64, device=world.device)
        self._forwards = 0
        self._handles: list[Any] = []
        if self._counters:
            ends = model.register_forward_hook(self._end_forward, always_call=True)
            self._handles = [world.schedule.observe(self, model), ends]

    def close(self) -> None:
        """Stop counting tokens and averaging the auxiliary loss. `read` still returns the statistics up to here."""
        for handle in self._handles:
            handle.remove()

    def before_forward(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if model is self._model():
            self._switch.fill_(model.training and torch.is_grad_enabled())

    def _end_forward(self, model: torch.nn.Module, args: tuple, outputs: Any) -> None:
        self._switch.zero_()
        loss = outputs.get("aux_loss") if isinstance(outputs, dict) else None
        if isinstance(loss, torch.Tensor) and model.training and torch.is_grad_enabled():
            self._loss += loss.detach()
            self._forwards += 1

    def read(self) -> dict[str, float]:
        """Return statistics of all ranks since the last call, and log the counts of the layer with the busiest expert.

        Collective: every rank must call it.

        Returns:
            A dictionary. It is empty if the model has no layers with experts that can be counted, or if one of these
            layers got no token.

            busiest_share: the largest share of a layer's tokens that a single expert got, over all layers. It is 1 / E
                if all E experts of every layer got the same number of tokens. A token counts once for each expert to
                which it is sent.
            unused_experts: the number of experts that got no token, in all layers together.
            aux_loss: the mean, over training forwards and ranks, of the auxiliary loss in the model's outputs, before
                it is multiplied by its coefficient. This entry is missing if the model returns no auxiliary loss.
        """
        if not self._counters:
            return {}
        world = current_world()
        counts = [counter.counts[:-1] for counter in self._counters.values()]
        forwards = self._loss.new_full((), self._forwards)
        totals = torch.cat([*(each.double() for each in counts), torch.stack([self._loss, forwards])])
        world.reduce.all_reduce(totals).wait()
        *layers, (loss, forwards) = (each.tolist() for each in totals.split([*map(len, counts), 2]))
        foreach_zero_([*(counter.counts for counter in self._counters.values()), self._loss])
        self._forwards = 0
        if not all(map(sum, layers)):
            return {}
        shares = [max(tokens) / sum(tokens) for tokens in layers]
        busiest = max(shares)
        if world.rank == 0:
            layer = shares.index(busiest)
            tokens = [int(each) for each in layers[layer]]
            _log.info(
                "tokens of each expert in %s, the layer with the busiest expert: %s", [*self._counters][layer], tokens
            )
        report = {"busiest_share": busiest, "unused_experts": float(sum(tokens.count(0) for tokens in layers))}
        return {**report, "aux_loss": loss / forwards} if forwards else report


class TokenCounter:
    """A forward pre-hook of a module with experts. It counts the tokens of each expert while `switch` is 1.

    `switch` is a tensor, so that the hook has no branch on the host and can be compiled with its layer. The hook is
    never removed from its module: it could not be added again, because a compiled layer ignores hooks that are added
    after it was compiled.

    Args:
        experts: the number of experts in the module.
        switch: scalar int64, 0 or 1, shared by all layers of a model.

    Attributes:
        counts: (experts + 1,) int64, the tokens of each expert. The last element counts tokens that transformers'
            expert parallelism has marked as belonging to experts of other ranks.
        switch: the argument `switch`.
    """

    def __init__(self, experts: int, switch: torch.Tensor) -> None:
        self.counts = switch.new_zeros(experts + 1)
        self.switch = switch

    def __call__(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        for each in (*args, *kwargs.values()):
            if isinstance(each, torch.Tensor) and each.dtype == torch.int64:  # the indices of each token's experts
                self.counts.scatter_add_(0, each.reshape(-1), self.switch.expand(each.numel()))
                return


def _counters_of(model: torch.nn.Module, world: World) -> tuple[torch.Tensor, dict[str, TokenCounter]]:
    """Register a TokenCounter on each module of experts in `model` that does not have one yet.

    A TokenCounter is a hook that counts the tokens of each expert. Returns the switch that all counters of the model
    share (1 while they count), and {name of module: counter}. Experts that do not use transformers' interface, such as
    Llama 4's, are left out.

    model: the model whose experts are counted.
    world: the world (set of ranks), whose device stores the counts.
    """
    counters: dict[str, TokenCounter] = {}
    missing = []
    for name, module in model.named_modules():
        if hasattr(module, "num_experts") and hasattr(module, "_apply_gate"):  # true for the experts of transformers
            hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, TokenCounter)]
            if hooks:
                counters[name] = hooks[0]
            else:
                missing.append((name, module))
    known = next(iter(counters.values()), None)
    switch = torch.zeros((), dtype=torch.int64, device=world.device) if known is None else known.switch
    for name, module in missing:
        counters[name] = TokenCounter(module.num_experts, switch)
        module.register_forward_pre_hook(counters[name], with_kwargs=True)
    return switch, counters
