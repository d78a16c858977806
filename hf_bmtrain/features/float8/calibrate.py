"""Calibration of float8: measures each layer's rounding noise once, and takes noisy layers out of float8.

Layers measure their noise in the first training step. Compiled blocks measure it in a separate, uncompiled forward
before that step, so that no graph contains the measurement or is recompiled when a layer stops using float8.
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
from ..replay.snapshot import Snapshot
from .gather import gather_float8
from .linear import Float8Linear, Float8State

_log = logging.getLogger("hf_bmtrain")
LEAST_DECIBELS = 20.0
"""The least signal-to-noise ratio, in dB, of a layer that stays in float8: at 20 dB the error is 10 % of the output."""


def install_signal_guard(
    model: torch.nn.Module, layers: Mapping[str, Any], blocks: Sequence[Any], world: World, compiled: bool
) -> None:
    """Install the observer that measures float8 layers in the first training step.

    After its decision, weights are gathered in float8. On the meta device nothing is measured, and weights are gathered
    in float8 immediately.

    Args:
        model: the model.
        layers: its Float8Linear layers, by path.
        blocks: its blocks.
        world: the world of the model.
        compiled: whether `blocks` are compiled.
    """
    states = {path: layer.float8_state for path, layer in layers.items()}
    if not states:
        return
    if world.device.type == "meta":
        gather_float8(world, states)
        return
    calibration = (CalibrationAhead if compiled else CalibrationInStep)(world, model, states, blocks)
    calibration.handle = world.schedule.observe(calibration, model)
    for state in states.values():
        state.guard = weakref.ref(calibration)  # a weak reference, because the schedule owns the calibration


class Calibration(Observer):
    """Decides before a forward which float8 layers of a model have too much noise, and then removes itself.

    A layer whose signal-to-noise ratio over all ranks is below LEAST_DECIBELS stops computing in float8, on every rank.
    Subclasses determine when layers measure and when the ranks decide.

    Attributes:
        handle: removes this observer from the schedule.
        states: the state of each layer, by the layer's path in the model.
    """

    position = 90
    handle: ObserverHandle

    def __init__(
        self, world: World, model: torch.nn.Module, states: dict[str, Float8State], blocks: Sequence[Any]
    ) -> None:
        self._world, self._model, self.states, self._blocks = world, weakref.ref(model), states, blocks

    @property
    def has_measured(self) -> bool:
        """True if all measurements are done and only the decision is left."""
        raise NotImplementedError

    def decide(self) -> None:
        """Compare the measurements of all ranks, and switch off float8 for layers below LEAST_DECIBELS.

        Collective: every rank must call it. From then on weights are gathered in float8, except in layers that were
        switched off or that no rank called, and except in models with adapters. Does nothing while the backward of a
        block is pending on some rank, because that block would be recomputed in another dtype.
        """
        nothing = torch.zeros(2, device=self._world.device)
        mine = torch.stack([nothing if state.powers is None else state.powers for state in self.states.values()])
        pending = any(block._bmt.pending for block in self._blocks)
        called = [state.powers is not None for state in self.states.values()]
        found = self._world.control.gather((pending, called, mine.tolist()), "the measurement of float8's noise")
        if any(pending for pending, *_ in found):
            return
        ratios: dict[str, float] = {}
        model = self._model()
        adapters = model is not None and bool(adapter_parameters(model))
        for number, (path, state) in enumerate(self.states.items()):
            signal, noise = (sum(powers[number][part] for *_, powers in found) for part in (0, 1))
            ratios[path] = decibels(signal, noise)
            state.active = ratios[path] >= LEAST_DECIBELS
            if not state.active:
                state.reason = "has left float8"
            elif not any(called[number] for _, called, _ in found):
                state.reason = "was not called"
            elif adapters:
                state.reason = "of a model with adapters"
        if self._world.rank == 0:
            _tell(ratios)
        self.finish()

    def finish(self) -> None:
        """Remove this observer, and from now on gather each weight as its layer's state says.

        Collective: every rank must call it.
        """
        self.handle.remove()
        for state in self.states.values():
            state.measures, state.powers, state.guard = False, None, None
        gather_float8(self._world, self.states)


class CalibrationInStep(Calibration):
    """Measures layers in the first training forward, and decides before a later one.

    The decision is made once the backward of the measured forward has ended on every rank.
    """

    _begun: int | None = None  # how many backwards had ended before the measured forward

    def before_forward(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if model is not self._model():
            return
        schedule, training = self._world.schedule, torch.is_grad_enabled()
        for state in self.states.values():
            state.measures = training and state.powers is None
        if not training:
            return
        if self._begun is None:
            self._begun = schedule.backwards
        elif self.has_measured:
            self.decide()

    @property
    def has_measured(self) -> bool:
        return self._begun is not None and self._world.schedule.backwards > self._begun


class CalibrationAhead(Calibration):
    """Measures layers in a separate forward just before the first training forward, and decides at once.

    The separate forward gets the arguments of the training forward; it is neither compiled nor differentiated. Random
    generators, buffers, attributes and containers are restored afterwards, even if the separate forward raises.
    """

    def before_forward(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if model is self._model() and torch.is_grad_enabled():
            self._measure(model, args, kwargs)
            self.decide()

    @property
    def has_measured(self) -> bool:
        return False  # `before_forward` decides right after measuring

    @torch.no_grad()
    def _measure(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        before = Snapshot.of(model, self._world.device, (*args, *kwargs.values()))
        # The forward may modify tensors in place, including tensors in lists and dictionaries, so it gets clones.
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, (args, kwargs))
        for state in self.states.values():
            state.measures, state.powers = True, None
        try:
            with uncompiled(self._blocks), self._world.schedule.calibration():
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
"""Maps the path of each float8 layer to (whether it computes in float8, why its weight is not gathered in float8)."""


def float8_decision(world: World, model: torch.nn.Module) -> Decision:
    """Return the decisions about the float8 layers of `model` that have been decided.

    Collective: every rank must call it. A calibration whose measurements are done on every rank decides first.
    """
    states = _states_of(model)
    for guard in _guards_of(states):
        if all(world.control.gather(guard.has_measured, "whether float8's noise is measured")):
            guard.decide()
    return {path: (state.active, state.reason) for path, state in states.items() if state.guard is None}


def restore_decision(world: World, model: torch.nn.Module, decision: Decision) -> None:
    """Apply a saved decision to the float8 layers of `model`, which then skip the measurement.

    Collective: every rank must call it.

    A layer that is decided already is not changed; a warning is logged if the saved decision differs. If the saved
    decision lacks a layer of a calibration, all layers of that calibration are measured as usual.

    Args:
        world: the world of the model.
        model: the model, or a module that contains it.
        decision: what `float8_decision` returned.
    """
    states = _states_of(model)
    differing = [path for path, state in states.items() if not _agrees(state, decision.get(path))]
    if differing and world.rank == 0:
        _log.warning(
            "float8: for %d of %d layers, such as '%s', the checkpoint and this model chose differently between float8 "
            "and bf16. This model chose before the checkpoint was loaded, and keeps its choice, so training will not "
            "continue bit for bit. Load the checkpoint before the first training step to get its choice.",
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
                "float8: this model has %d float8 layers, and the checkpoint has the "
                "calibration of only %d of them. All are measured again, and training will "
                "not continue bit for bit.", len(found), len(known),
            )  # fmt: skip


def _agrees(state: Float8State, found: tuple[bool, str | None] | None) -> bool:
    """Return whether a layer's decision agrees with its saved decision `found`.

    A layer without a decision, or without a saved one (None), agrees.
    """
    return state.guard is not None or found is None or found[0] == state.active


def _guards_of(states: Mapping[str, Float8State]) -> list[Calibration]:
    """Return the calibrations, without duplicates, that have yet to decide about a layer of `states`."""
    found = [state.guard() for state in states.values() if state.guard is not None]
    return [guard for guard in dict.fromkeys(found) if guard is not None]


def _states_of(model: torch.nn.Module) -> dict[str, Float8State]:
    return {path: module.float8_state for path, module in model.named_modules() if isinstance(module, Float8Linear)}


def _tell(ratios: dict[str, float]) -> None:
    for path, ratio in ratios.items():
        if ratio < LEAST_DECIBELS:
            _log.warning(
                "float8: the signal-to-noise ratio of '%s' is %.1f dB, below %.0f. From now on this layer computes in "
                "its own dtype. To leave such layers out from the start, pass keep=[%r] to auto_wrap.",
                path, ratio, LEAST_DECIBELS, path.rpartition(".")[2],
            )  # fmt: skip
    _log.info(
        "float8: signal-to-noise ratio of each layer's output in dB (a layer below %.0f stops using float8; inf means "
        "that no noise was measured): %s",
        LEAST_DECIBELS, ", ".join(f"{path} {ratio:.1f}" for path, ratio in ratios.items()),
    )  # fmt: skip


def decibels(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise), or inf if an argument is zero or not finite. Both are sums of squares."""
    if not math.isfinite(signal) or not math.isfinite(noise):
        return math.inf  # the output overflowed. Rounding does not cause this, and the loss scale handles it
    return 10 * math.log10(signal / noise) if noise > 0 < signal else math.inf
