"""Calibration of float8: measure each layer's rounding noise, and stop using float8 in layers with too much noise.

The noise is measured when training begins, in training forwards. If blocks are compiled by then, it is measured in a
separate, uncompiled forward before the first training forward. So the compiled graphs do not contain the measurement,
and are not recompiled when a layer stops using float8.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...engine.base.torch_internals import pytree
from ...engine.blocks.block import uncompiled
from ...engine.blocks.observer import Observer, ObserverHandle
from ...engine.runtime.world import World
from ...engine.wrap.find import adapter_parameters
from ...engine.wrap.model_hook import after_later_hooks
from ..replay.replay import Snapshot
from .gather import WITH_ADAPTERS, gather_float8
from .linear import Float8Linear, Float8State

_log = logging.getLogger("hf_bmtrain")
LEAST_DECIBELS = 20.0
"""The lowest signal-to-noise ratio, in dB, with which a layer keeps using float8. At 20 dB, the error is 10 % of the
output."""


def install_signal_guard(
    model: torch.nn.Module, layers: Mapping[str, Any], blocks: Sequence[Any], world: World
) -> None:
    """Install the observer that switches off float8 in layers whose outputs have too low a signal-to-noise ratio.

    The noise is the rounding error of float8. The observer works in three steps:

    1. It measures the noise of each layer when training begins.
    2. The ranks decide together which layers keep float8.
    3. It switches all-gathers of weights to float8, and removes itself.

    Step 3 affects the weights that `choose_gathered` has selected. They are stored in flat buffers, each of which is
    all-gathered as a whole. A buffer is still all-gathered in its own dtype if one of its layers has stopped using
    float8, or was called on no rank. In a model with adapters, no buffer is all-gathered in float8.

    On the meta device no observer is installed and nothing is measured: all layers keep float8, and the selected
    weights are all-gathered in float8 immediately.

    Args:
        model: the model.
        layers: its Float8Linear layers, by path. If there are none, nothing is installed.
        blocks: its blocks (transformer layers).
        world: the ranks over which the model is sharded.
    """
    states = {path: layer.float8_state for path, layer in layers.items()}
    if not states:
        return
    if world.device.type == "meta":
        gather_float8(world, states)
        return
    calibration = Calibration(world, model, states, blocks)
    calibration.handle = world.schedule.observe(calibration, model)
    for state in states.values():
        state.guard = weakref.ref(calibration)  # a weak reference, because the schedule owns the calibration


class Calibration(Observer):
    """Decides which float8 layers of a model have too much rounding noise, and then removes itself.

    A layer whose signal-to-noise ratio over all ranks is below LEAST_DECIBELS stops computing in float8, on every rank.
    When the layers are measured depends on whether blocks are compiled at the first training forward:

    * If no block is compiled, each layer is measured at its first call in a training forward. At the start of the first
      training forward that follows a backward, or when a checkpoint is saved after a backward, the ranks decide.
    * Otherwise, all layers are measured in a separate forward just before the first training forward, so that the
      compiled graphs do not contain the measurement. The ranks decide right after it. See `_measure`.

    If a block on any rank is still waiting for its backward when the ranks want to decide, they try again at the start
    of the next training forward. (A separate forward is then repeated.)

    Args:
        world: the ranks over which the model is sharded.
        model: the model. Layers are measured only in its own forwards, not in those of a model that contains it.
        states: the state of each float8 layer, by the layer's path in the model.
        blocks: the model's blocks (transformer layers).

    Attributes:
        handle: its `remove()` removes this observer, so that forwards no longer call it.
        states: the state of each float8 layer, by the layer's path in the model.
    """

    position = 90
    handle: ObserverHandle

    def __init__(
        self, world: World, model: torch.nn.Module, states: dict[str, Float8State], blocks: Sequence[Any]
    ) -> None:
        self._world, self._model, self.states, self._blocks = world, weakref.ref(model), states, blocks
        # The number of backwards that had ended when the first training forward with measured layers began. None before
        # that forward. It stays None if the layers are measured in a separate forward.
        self._begun: int | None = None

    def before_forward(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if model is not self._model():
            return
        training = torch.is_grad_enabled()
        if self._begun is None and any(block._bmt.compiled for block in self._blocks):
            if training:
                self._measure(model, args, kwargs)
                self.decide()
            return
        for state in self.states.values():
            state.measures = training and state.powers is None
        if not training:
            return
        if self._begun is None:
            self._begun = self._world.schedule.backwards
        elif self.has_measured:
            self.decide()

    @property
    def has_measured(self) -> bool:
        """Whether this rank has measured the rounding noise in training forwards, and a backward has ended since then.

        Read only before the ranks have decided which layers keep float8. If True on all ranks when a checkpoint is
        saved, the ranks first call `decide`, so that the checkpoint contains the decision. Measurements in a separate
        forward do not count: if the ranks cannot decide right after that forward, they measure again in another one.
        """
        return self._begun is not None and self._world.schedule.backwards > self._begun

    def decide(self) -> None:
        """Combine the measurements of all ranks, and switch off float8 for layers with too much rounding noise.

        Collective: every rank must call it. At the end it calls `finish`, which switches all-gathers of weights to
        float8. If a layer has too much noise, or if no rank has called the layer, the attribute `reason` of its
        Float8State says so. The flat buffer that contains the layer's weight is then still all-gathered in its own
        dtype.

        If a block on some rank is still waiting for its backward, this method changes nothing and does not call
        `finish`: a layer that stopped using float8 now would be recomputed in a different dtype than in the forward.
        """
        nothing = torch.zeros(2, dtype=torch.float32, device=self._world.device)
        mine = torch.stack([nothing if state.powers is None else state.powers for state in self.states.values()])
        pending = any(block._bmt.pending for block in self._blocks)
        called = [state.powers is not None for state in self.states.values()]
        found = self._world.control.gather((pending, called, mine.tolist()), "the measurement of float8's noise")
        if any(pending for pending, *_ in found):
            return
        ratios: dict[str, float] = {}
        for number, (path, state) in enumerate(self.states.items()):
            signal, noise = (sum(powers[number][part] for *_, powers in found) for part in (0, 1))
            ratios[path] = decibels(signal, noise)
            state.active = ratios[path] >= LEAST_DECIBELS
            if not state.active:
                state.reason = "has too much rounding noise"
            elif not any(called[number] for _, called, _ in found):
                state.reason = "was not called"
        if self._world.rank == 0:
            _tell(ratios)
        self.finish()

    def finish(self) -> None:
        """End the calibration: remove this observer, and switch all-gathers of weights to float8 where possible.

        Called after the decision about each layer was made by `decide`, or read from a checkpoint by
        `restore_decision`. Collective: every rank must call it.

        If the state of a layer has a `reason` (such as too much rounding noise), the layer's weight and all other
        weights in the same flat buffer are still all-gathered in their own dtype. If the model has adapters (they may
        have been added after the model was wrapped), every layer without a `reason` first gets the `reason`
        WITH_ADAPTERS, so that all weights are still all-gathered in their own dtype.
        """
        self.handle.remove()
        model = self._model()
        adapters = model is not None and bool(adapter_parameters(model))
        for state in self.states.values():
            if adapters and state.reason is None:
                state.reason = WITH_ADAPTERS
            state.measures, state.powers, state.guard = False, None, None
        gather_float8(self._world, self.states)

    @torch.no_grad()
    def _measure(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Measure the rounding noise of all layers in a separate forward, uncompiled and without gradients.

        Called before the training forward. The separate forward gets copies of the training forward's arguments. The
        model's forward pre-hooks that have not run yet are called with these copies first, and may change them. So
        these hooks run twice: for the separate forward, and for the training forward. After the separate forward, even
        if it raises an error, these are restored: random generators, the model's buffers and attributes, and containers
        (such as lists and caches) in the attributes and arguments.
        """
        before = Snapshot.of(model, self._world.device, (*args, *kwargs.values()))
        # The forward may modify tensors in place, including tensors in lists and dictionaries, so it gets clones.
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, (args, kwargs))
        for state in self.states.values():
            state.measures, state.powers = True, None
        try:
            with uncompiled(self._blocks), self._world.schedule.calibration():
                args, kwargs = after_later_hooks(model, args, kwargs)
                model.forward(*args, **kwargs)
        except BaseException:
            for state in self.states.values():
                state.powers = None
            raise
        finally:
            for state in self.states.values():
                state.measures = False
            before.restore()


Decision = dict[str, tuple[bool, str | None]]
"""{path of a layer: (whether it computes in float8, `reason`)}.

`reason` says why the layer's weight, and so all weights that are all-gathered together with it, cannot be all-gathered
in float8. It is None if the layer does not prevent this."""


def float8_decision(world: World, model: torch.nn.Module) -> Decision:
    """Return, for a checkpoint, which float8 layers of `model` keep computing in float8.

    The other layers compute in their own dtype, because their rounding noise was too high. If all ranks have measured
    the rounding noise of the layers, but have not yet decided which of them keep float8, they decide first.

    Collective: every rank must call it.

    Args:
        world: the ranks over which the model is sharded.
        model: the model, or a module that contains it.

    Returns:
        {path of a layer: (whether it computes in float8, `reason`)}. `reason` says why the layer's weight cannot be
        all-gathered in float8; None if the layer does not prevent this. If one layer prevents it, all weights in the
        same flat buffer are all-gathered in their own dtype. Layers about which the ranks have not decided are left
        out.
    """
    states = float8_states(model)
    for guard in _guards_of(states):
        if all(world.control.gather(guard.has_measured, "whether float8's noise is measured")):
            guard.decide()
    return {path: (state.active, state.reason) for path, state in states.items() if state.guard is None}


def restore_decision(world: World, model: torch.nn.Module, decision: Decision) -> None:
    """Apply a checkpoint's decision about float8 to the layers of `model`, so that no rounding noise is measured.

    Collective: every rank must call it.

    If the ranks have already decided about a layer, their decision stays, and a warning is logged if the checkpoint's
    decision differs. If the ranks have not decided yet, the checkpoint's decision is applied only if it covers every
    float8 layer of the model. Otherwise the noise of all layers is measured as usual, and if the checkpoint's decision
    covers some of the layers, a warning is logged.

    Args:
        world: the ranks over which the model is sharded.
        model: the model, or a module that contains it.
        decision: the result of `float8_decision` in the run that saved the checkpoint.
    """
    states = float8_states(model)
    differing = [path for path, state in states.items() if not _agrees(state, decision.get(path))]
    if differing and world.rank == 0:
        _log.warning(
            "float8: for %d of %d layers, such as '%s', the checkpoint and this model differ in whether the layer uses "
            "float8. For this model, that was decided before the checkpoint was loaded (in a training step, or by an "
            "earlier checkpoint), and is not changed now. So results will differ slightly from those of the run that "
            "saved the checkpoint. To use the checkpoint's decision, load it before the first training step.",
            len(differing), len(states), differing[0],
        )  # fmt: skip
    paths = {state: path for path, state in states.items()}
    for guard in _guards_of(states):
        found = {state: decision.get(paths.get(state, "")) for state in guard.states.values()}
        known = {state: each for state, each in found.items() if each is not None}
        if len(known) == len(found):
            for state, (active, reason) in known.items():
                state.active, state.reason = active, reason
            guard.finish()
        elif known and world.rank == 0:
            _log.warning(
                "float8: this model has %d layers that can use float8, but the checkpoint says for only %d of them "
                "whether they use it. So training measures the rounding noise of all of them, and results may differ "
                "slightly from those of the run that saved the checkpoint. To avoid this, pass the same float8= and "
                "keep= to auto_wrap as in that run.", len(found), len(known),
            )  # fmt: skip


def _agrees(state: Float8State, found: tuple[bool, str | None] | None) -> bool:
    """Return whether the checkpoint's decision `found` and the ranks' own decision agree on a layer's use of float8.

    The reasons in the decisions are not compared. Also returns True if there is nothing to compare: the ranks have not
    decided about the layer, or `found` is None.

    state: the state of the layer.
    found: (whether the layer uses float8, the `reason` why its weight cannot be all-gathered in float8, or None), or
        None if the checkpoint does not contain the layer.
    """
    return state.guard is not None or found is None or found[0] == state.active


def _guards_of(states: Mapping[str, Float8State]) -> list[Calibration]:
    """Return the Calibration of each layer with one of these `states`, except for layers that it has decided about.

    All layers of one model have the same Calibration, which is returned once.
    """
    found = [state.guard() for state in states.values() if state.guard is not None]
    return [guard for guard in dict.fromkeys(found) if guard is not None]


def float8_states(model: torch.nn.Module) -> dict[str, Float8State]:
    """Return {path of a float8 layer in `model`: its state}."""
    return {path: module.float8_state for path, module in model.named_modules() if isinstance(module, Float8Linear)}


def _tell(ratios: dict[str, float]) -> None:
    for path, ratio in ratios.items():
        if ratio < LEAST_DECIBELS:
            _log.warning(
                "float8: the output of '%s' has a signal-to-noise ratio of %.1f dB, below the minimum of %.0f dB. From "
                "now on this layer computes in its own dtype. To leave such layers out from the start, pass keep=[%r] "
                "to auto_wrap.",
                path, ratio, LEAST_DECIBELS, path.rpartition(".")[2],
            )  # fmt: skip
    _log.info(
        "float8: signal-to-noise ratio of each layer's output in dB (a layer below %.0f stops using float8; inf means "
        "that no rank has called the layer, or that its output was exact, zero or not finite): %s",
        LEAST_DECIBELS, ", ".join(f"{path} {ratio:.1f}" for path, ratio in ratios.items()),
    )  # fmt: skip


def decibels(signal: float, noise: float) -> float:
    """Return the signal-to-noise ratio in dB, 10 log10(signal / noise), or inf if either number is zero or not finite.

    With inf, a layer keeps float8. These cases are no reason to switch it off: without noise the output is exact;
    without a signal the output is zero, or the layer was not called; and a number that is not finite means that the
    output overflowed, which is not rounding noise.

    Args:
        signal: the sum of squares of the exact output.
        noise: the sum of squares of the error in the output.
    """
    if not math.isfinite(signal) or not math.isfinite(noise):
        return math.inf  # the output overflowed, which is not rounding noise
    return 10 * math.log10(signal / noise) if noise > 0 < signal else math.inf
