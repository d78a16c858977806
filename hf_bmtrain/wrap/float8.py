"""auto_wrap(float8=...): the linear layers of blocks that compute in float8, and those that do not, with the reason.

Activations and gradients have one scale a token, weights one a tensor: on an H200 such products are 1.7 to 1.9 times as
fast as in bfloat16, with scales of 128 x 128 elements 1.4 to 1.7 times.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch

from ..blocks.float8_linear import Float8Inputs, Float8Linear, Float8State, extend_linear
from ..ops.float8 import ALIGNMENT, check_device
from ..runtime.world import World
from .find import Chain, adapter_parameters
from .float8_gather import gather_float8

_log = logging.getLogger("hf_bmtrain")
UseFloat8 = bool | Literal["rows"]
LEAST_DECIBELS = 20.0
"""The signal-to-noise ratio of a layer's output below which it does not compute in float8: rounding adds 10 %."""
_ROUTERS = ("router", "gate")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_float8(float8: UseFloat8, keep: Any) -> None:
    """Raise ValueError or TypeError for arguments that `auto_wrap` does not document."""
    if not isinstance(float8, bool) and not (isinstance(float8, str) and float8 == "rows"):
        raise ValueError(f"float8 must be True, False or 'rows', got {float8!r}")
    if not isinstance(keep, (list, tuple)) or not all(isinstance(name, str) for name in keep):
        raise TypeError(f"keep must be a list of names of modules, such as ['down_proj'], got {keep!r}")


def choose_float8(
    model: torch.nn.Module, blocks: Chain, device: torch.device, float8: UseFloat8, keep: Sequence[str]
) -> dict[str, torch.nn.Module]:
    """Return by path the linear layers in `blocks` that are to compute in float8, and log which and why others are not.

    Raises ValueError if there is none, if a name in `keep` fits none, or if the device has no float8 products.
    """
    if not float8:
        if keep:
            raise ValueError(
                f"auto_wrap: keep={[*keep]} names layers that float8 leaves out: pass float8=True with it."
            )
        return {}
    check_device(device)
    layers, left = _choose(model, blocks, keep)
    _log.info("%s", _table(layers, left))
    return layers


def check_late_float8(model: torch.nn.Module, float8: UseFloat8) -> None:
    """Raise ValueError if `model`, wrapped before without float8, is to compute in it now."""
    if float8 and not any(isinstance(module, Float8Linear) for module in model.modules()):
        raise ValueError(
            "auto_wrap: this model was wrapped without float8, which is chosen once: load it again and wrap it with "
            "float8, or leave float8 out here."
        )


def apply_float8(
    model: torch.nn.Module, layers: dict[str, torch.nn.Module], blocks: Chain, world: World, compiled: bool
) -> None:
    """Make `layers` of `model`, by path, compute in float8, and measure them in its first training forward.

    They are not measured if they are compiled, nor on the meta device. Then call `gather_float8` once they are sharded.
    """
    inputs = Float8Inputs()
    states = {path: extend_linear(layer, is_conv1d(layer), inputs) for path, layer in layers.items()}
    if states and is_measured(world, compiled):
        guard = SignalGuard(world, states, blocks)
        guard.handle = model.register_forward_pre_hook(guard)


def is_measured(world: World, compiled: bool) -> bool:
    """Return whether float8 layers are measured in the first training forward."""
    return not compiled and world.device.type != "meta"


def is_conv1d(module: torch.nn.Module) -> bool:
    """Return whether `module` is transformers' Conv1D, a linear layer whose weight is (K, N)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "nx")


def _choose(
    model: torch.nn.Module, blocks: Chain, keep: Sequence[str]
) -> tuple[dict[str, torch.nn.Module], dict[str, str]]:
    """Return by path the linear layers of `blocks` that are to compute in float8, and why others do not."""
    names = {module: path for path, module in model.named_modules()}
    adapters, unused = adapter_parameters(model), {*keep}
    attentions = [module for block in blocks for module in block.modules() if _reads_weights(module)]
    inside = {child for module in attentions for child in module.modules()}
    layers: dict[str, torch.nn.Module] = {}
    left: dict[str, str] = {}
    for module in dict.fromkeys(module for block in blocks for module in block.modules()):
        if not isinstance(module, torch.nn.Linear) and not is_conv1d(module):
            continue
        path = names[module]
        asked = [name for name in keep if f".{name}." in f".{path}."]
        unused.difference_update(asked)
        reason = "named in keep" if asked else _reason(module, path, adapters)
        reason = "its weight is read by the attention around it" if module in inside and not reason else reason
        if reason:
            left[path] = reason
        else:
            layers[path] = module
    if unused:
        raise ValueError(
            f"auto_wrap: keep names {sorted(unused)}, and no linear layer of a block is called so or is in a module "
            f"called so. Layers are: {', '.join(sorted({path.rpartition('.')[2] for path in [*layers, *left]}))}."
        )
    if not layers:
        reasons = "; ".join(_grouped(left)) or "blocks have no linear layers"
        raise ValueError(f"auto_wrap: float8 finds no layer for it in {type(model).__name__}: {reasons}.")
    return layers, left


def _reason(module: torch.nn.Module, path: str, adapters: set[int]) -> str:
    """Return why a linear layer stays as it is, "" if it need not."""
    weight: Any = module.weight
    if not is_conv1d(module) and type(module).forward is not torch.nn.Linear.forward:
        return f"{type(module).__name__} has a forward of its own"
    if "forward" in vars(module):
        return "its forward is replaced"
    if id(weight) in adapters:
        return "of an adapter"
    if path.rpartition(".")[2] in _ROUTERS:
        return "a router"
    if weight.dtype not in _DTYPES:
        return f"its weight is {weight.dtype}"
    if any(size % ALIGNMENT for size in weight.shape):
        return f"its sizes are no multiples of {ALIGNMENT}"
    return ""


def _reads_weights(module: torch.nn.Module) -> bool:
    """Return whether a module computes with the weights of linear layers in it without calling them."""
    return isinstance(module, (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer))


def _table(layers: Iterable[str], left: dict[str, str]) -> str:
    """Return which layers compute in float8 and which do not, counted by their names."""
    lines = ["float8: products of linear layers in blocks, with a scale for each token and one for each weight"]
    lines.append(f"  in float8: {', '.join(_counted(layers))}")
    lines += [f"  not: {text}" for text in _grouped(left)]
    lines.append("  not: embeddings, head, norms, attention and all that is outside blocks")
    return "\n".join(lines)


def _grouped(left: dict[str, str]) -> list[str]:
    reasons = dict.fromkeys(left.values())
    return [f"{', '.join(_counted(p for p in left if left[p] == reason))} ({reason})" for reason in reasons]


def _counted(paths: Iterable[str]) -> list[str]:
    counts = Counter(path.rpartition(".")[2] for path in paths)
    return [f"{count} x {name}" for name, count in counts.items()]


class SignalGuard:
    """A forward pre-hook of a model: measures its layers in the first training forward, and decides after the step.

    A layer whose signal-to-noise ratio over all ranks is below LEAST_DECIBELS computes without float8 from then on, on
    every rank. The ranks exchange what they measured in a forward of the model before which each has made a backward,
    and while none has a block whose backward is to come: it would be recomputed in another dtype. handle: removes the
    hook.
    """

    handle: Any

    def __init__(self, world: World, states: dict[str, Float8State], blocks: Sequence[Any]) -> None:
        self._world, self._states, self._blocks = world, states, blocks
        self._begun: int | None = None  # backwards before the measured forward

    def __call__(self, model: torch.nn.Module, args: tuple) -> None:
        schedule = self._world.schedule
        if not torch.is_grad_enabled() or schedule.in_backward:
            return
        if self._begun is None:
            self._begun = schedule.backwards
            for state in self._states.values():
                state.measures = True
        elif schedule.backwards > self._begun:
            self._decide(model)

    def _decide(self, model: torch.nn.Module) -> None:
        """Compare the ranks' measurements, and leave out layers that are below the bound. Collective.

        Weights are gathered in float8 from then on, but for those of layers that were left out, or that no rank called.
        """
        nothing = torch.zeros(2, device=self._world.device)
        mine = torch.stack([nothing if state.powers is None else state.powers for state in self._states.values()])
        pending = any(block._bmt.pending for block in self._blocks)
        called = [state.powers is not None for state in self._states.values()]
        found = self._world.control.gather((pending, called, mine.tolist()), "the measurement of float8's noise")
        if any(pending for pending, *_ in found):
            return
        self.handle.remove()
        ratios: dict[str, float] = {}
        reasons = dict.fromkeys(self._states, "of a model with adapters") if adapter_parameters(model) else {}
        for number, (path, state) in enumerate(self._states.items()):
            state.measures, state.powers = False, None
            signal, noise = (sum(powers[number][part] for *_, powers in found) for part in (0, 1))
            ratios[path] = decibels(signal, noise)
            state.active = ratios[path] >= LEAST_DECIBELS
            if not state.active:
                reasons[path] = "has left float8"
            elif not any(called[number] for _, called, _ in found):
                reasons[path] = "was not called"
        if self._world.rank == 0:
            _tell(ratios)
        gather_float8(self._world, self._states, reasons)


def _tell(ratios: dict[str, float]) -> None:
    for path, ratio in ratios.items():
        if ratio < LEAST_DECIBELS:
            _log.warning(
                "float8: the signal-to-noise ratio of '%s' is %.1f dB, below %.0f: from now on it computes in its own "
                "dtype. keep=[%r] leaves such layers out from the start.",
                path, ratio, LEAST_DECIBELS, path.rpartition(".")[2],
            )  # fmt: skip
    _log.info("float8: signal-to-noise in dB: %s", ", ".join(f"{path} {ratio:.1f}" for path, ratio in ratios.items()))


def decibels(signal: float, noise: float) -> float:
    """Return the ratio of two sums of squares in decibels; inf without noise, or without a measurement."""
    if not math.isfinite(signal) or not math.isfinite(noise):
        return math.inf  # an overflow, of which the loss scale takes care
    return 10 * math.log10(signal / noise) if noise > 0 < signal else math.inf
