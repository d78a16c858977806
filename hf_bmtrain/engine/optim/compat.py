"""Checks of every optimizer that steps over slices, of any class.

A user may create any torch optimizer over slices, or may have created it before the model was sharded. Only torch's
process-wide hook before a step reaches all of them; `init_distributed` registers it. An optimizer is checked in its
first step, and again after its parameter groups have changed or something was sharded; any other step only verifies
that neither has happened, and notes its settings in the journal, which the ranks compare.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..base.torch_internals import FOREACH_TYPES
from ..comm.collective_log import CollectiveLog, option_kind, value_code
from ..runtime.world import World, current_world
from ..sharding.parameter import DistributedParameter
from ..tensors.tensor import ShardTensor
from .adam import AdamOptimizer
from .runs import same_members
from .state import FullState, full_facts

_log = logging.getLogger("hf_bmtrain")
_ROWS, _COLUMNS, _CUT, _STEPS, _LR = 6, 8, 19, 3, 0.05
_PLAIN = (bool, int, float, str, type(None))


def check(optimizer: torch.optim.Optimizer) -> FullState | None:
    """Check that `optimizer` can step over slices. Return its WholeState, or None if it holds no slice. Collective.

    Raises RuntimeError if it holds parameters from before wrapping, or ordinary ones that nobody averages, or if the
    ranks' optimizers differ, and TypeError if its update depends on shapes.
    """
    parameters: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
    stale = [p for p in parameters if getattr(p, "sharded_elsewhere", False)]
    if stale:
        raise RuntimeError(
            f"{type(optimizer).__name__} holds {len(stale)} of {len(parameters)} parameters from before the model was "
            "sharded; they belong to it no more, and nothing would be trained. Make the optimizer after auto_wrap, "
            "from model.parameters()."
        )
    known = getattr(optimizer, "full_state", None)
    slices = [p for p in parameters if isinstance(p, DistributedParameter)]
    if slices:
        world = current_world()
        world.check_same_on_all_ranks("optimizer.step", _facts(optimizer, world))
        _check_averaged(optimizer, [p for p in parameters if not isinstance(p, DistributedParameter)])
    if known is None and slices:
        if type(optimizer).__module__.split(".")[0] != __name__.split(".")[0]:  # ours are element-wise
            _check_element_wise(optimizer, slices[0].device)
        known = optimizer.full_state = FullState(optimizer)  # pyright: ignore[reportAttributeAccessIssue]
    return known


def _check_averaged(optimizer: torch.optim.Optimizer, ordinary: Sequence[torch.nn.Parameter]) -> None:
    """Raise RuntimeError if `ordinary` parameters alongside slices have other gradients on each rank. Collective."""
    world = current_world()
    if world.size == 1 or not ordinary:
        return
    # As texts, because nan differs from itself.
    gradients = [None if p.grad is None else f"{p.grad.double().sum().item()} of {tuple(p.shape)}" for p in ordinary]
    everyone = world.gather_objects(gradients)
    if any(other != gradients for other in everyone):
        raise RuntimeError(
            f"{type(optimizer).__name__} holds {len(ordinary)} ordinary parameters that are not sharded (the first has "
            f"shape {tuple(ordinary[0].shape)}), and their gradients differ between the ranks, because nobody averages "
            "them. Wrap the outermost model, which holds them too, or average their gradients before step()."
        )


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    made, seen, noted = getattr(optimizer, "checked", (0, [], []))
    now = current_world().buffers.made
    groups = [group["params"] for group in optimizer.param_groups]
    if made != now or not same_members(groups, seen):
        noted = []
        if check(optimizer) is not None and (world := current_world()).size > 1:
            noted = [_NotedOptions(group, world.reduce.collective_log) for group in optimizer.param_groups]
        optimizer.checked = now, [[*group] for group in groups], noted
    full_state = getattr(optimizer, "full_state", None)
    if full_state is not None:
        for group, options in zip(optimizer.param_groups, noted):
            options.step(group)
        _finish_load(optimizer, full_state)


def _finish_load(optimizer: Any, full_state: FullState) -> None:
    """Compare the whole state that was loaded since the last step with the other ranks', and slice it. Collective."""
    facts = None
    if isinstance(optimizer, AdamOptimizer):  # it has sliced it
        facts, optimizer.loaded_facts = optimizer.loaded_facts, None
    elif full_state.is_loaded(optimizer) and optimizer.state:
        facts = full_facts((p, *item) for p, state in optimizer.state.items() for item in state.items())
    if facts is not None:
        current_world().check_same_on_all_ranks("optimizer.step after load_state_dict", facts)
    if not isinstance(optimizer, AdamOptimizer) and full_state.is_loaded(optimizer):
        full_state.shard_loaded(optimizer)


def install() -> Callable[[], None]:
    """Check every optimizer before its steps, and let torch use functions on lists for slices.

    Returns:
        A function that undoes both.
    """
    handle = register_optimizer_step_pre_hook(_before_step)
    ours = ShardTensor, DistributedParameter
    for types in FOREACH_TYPES:
        types += ours

    def undo() -> None:
        handle.remove()
        for types in FOREACH_TYPES:
            for kind in ours:
                types.remove(kind)

    return undo


# -- the same optimizer on every rank -------------------------------------------------------------------------------


def _facts(optimizer: Any, world: World) -> dict[str, Any]:
    """Return what must be equal on all ranks of an optimizer that holds slices, for `World.agree`.

    A number of the options that is a tensor is read, which waits for the device.
    """
    groups = optimizer.param_groups
    facts: dict[str, Any] = {"class": type(optimizer).__qualname__, "number of parameter groups": len(groups)}
    facts["has state"] = bool(optimizer.state)
    if isinstance(optimizer, AdamOptimizer):
        facts["exp_avg_dtype"] = optimizer._exp_avg_dtype
    for number, group in enumerate(groups):
        for name, value in group.items():
            if _is_plain(value) or (isinstance(value, torch.Tensor) and value.numel() == 1):
                facts[f"{name} of group {number}"] = value.item() if isinstance(value, torch.Tensor) else value
    for number, group in enumerate(groups):
        for position, parameter in enumerate(group["params"]):
            held = f"group {number}, shape {tuple(parameter.shape)}, requires_grad={parameter.requires_grad}"
            facts[_name_of(parameter, position, world)] = held
    return facts


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(each, _PLAIN) for each in value))


def _name_of(parameter: Any, position: int, world: World) -> str:
    if not isinstance(parameter, DistributedParameter):
        return f"ordinary parameter {position}"
    buffer = parameter.buffer
    held = world.monitor.names.get(buffer.number, f"buffer {buffer.number}")
    origin = parameter.origin
    name = parameter.index if origin is None else f"{origin.block}.{origin.name}".lstrip(".")
    return f"parameter '{name}' of the buffer of {held}"


class _NotedOptions:
    """Notes the learning rate of a parameter group in each step, and other plain options that changed since the last.

    What is on another device, such as a learning rate in a tensor, is left out: reading it would wait for that.
    """

    def __init__(self, group: dict[str, Any], collective_log: CollectiveLog) -> None:
        self._note = collective_log.note
        self._names = [name for name, value in group.items() if name != "lr" and _is_plain(value)]
        self._values = [*map(group.get, self._names)]

    def step(self, group: dict[str, Any]) -> None:
        """Note the settings of this step, for the watch to compare."""
        rate = group.get("lr")
        if isinstance(rate, torch.Tensor):
            rate = rate.item() if rate.device.type == "cpu" and rate.numel() == 1 else None
        if isinstance(rate, (int, float)):
            self._note(value_code("step with learning rate", rate))
        present, before = [*map(group.get, self._names)], self._values
        if present == before:
            return
        self._values = present
        for name, new, old in zip(self._names, present, before):
            for number in (new if isinstance(new, tuple) else (new,)) if new != old else ():
                if isinstance(number, (int, float)):
                    self._note(value_code(option_kind(name), number))


# -- the trial on a small matrix ------------------------------------------------------------------------------------


def _check_element_wise(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Raise TypeError unless `optimizer` moves a matrix and flat parts of it alike, because slices are such parts.

    For each parameter group, three new optimizers of the same class and options make three steps: one on a small matrix
    and two on the same values in flat parts. Adafactor, LAMB, Muon and LBFGS move them differently. Such an optimizer
    is tried on slices of a matrix as well, of which functions of torch see the whole. Collective then, and all ranks
    come to it alike, because they try the same values.
    """
    generator = torch.Generator().manual_seed(0)
    shape = _STEPS + 1, _ROWS, _COLUMNS
    weights, *gradients = torch.randn(shape, generator=generator, dtype=torch.float64).to(device)
    for group in optimizer.param_groups:
        for dtype in (torch.float64, torch.float32):  # float64 shows small differences, but some kernels lack it
            try:
                values, tries = weights.to(dtype), [gradient.to(dtype) for gradient in gradients]
                moved = _movement(optimizer, group, values, tries).view(-1)
                break
            except Exception as error:
                reason = error
        else:
            message = "%s could not be tried on a matrix (%s): whether it is element-wise, as slices need, is not known"
            _log.warning(message, type(optimizer).__name__, reason)
            return
        flat = functools.partial(_move_parts, optimizer, group, values.view(-1), [each.view(-1) for each in tries])
        if _difference(flat, moved) is None:
            continue
        # Large enough for every rank to hold a part of it.
        shape = _STEPS + 1, _ROWS, _COLUMNS * current_world().size
        values, *tries = torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)
        moved = _movement(optimizer, group, values, tries)
        reason = _difference(functools.partial(_move_local, optimizer, group, values, tries), moved)
        if reason is not None:
            raise TypeError(
                f"{type(optimizer).__name__} depends on the shapes of parameters ({reason}), but after auto_wrap each "
                "rank stores a part of them. Use an element-wise optimizer (hf_bmtrain's AdamOptimizer, "
                "torch.optim.SGD, Adam, AdamW, RMSprop, Adagrad, Lion), or one that computes with whole matrices by "
                "functions of torch in float32 (Adafactor, LAMB, LBFGS)."
            )


def _difference(move: Callable[[], torch.Tensor], expected: torch.Tensor) -> str | None:
    """Return how the movement of flat pieces that `move` makes differs from the expected one, None if it is equal."""
    try:
        moved = move()
    except Exception as error:
        return f"it fails on a flat piece ({error})"
    difference = ((moved - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()
    if difference <= 1e-3:
        return None
    return f"it moves parts of a matrix by up to {100 * difference:.2g} % of a step differently"


def _move_parts(optimizer: Any, group: dict, values: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the movement of flat `values` in two parts, by an optimizer for each."""
    cuts = slice(None, _CUT), slice(_CUT, None)
    return torch.cat([_movement(optimizer, group, values[cut], [each[cut] for each in gradients]) for cut in cuts])


def _move_local(optimizer: Any, group: dict, values: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the movement of `values` in slices. Collective."""
    parameter = DistributedParameter(values)
    pieces = [parameter.take(gradient).clone() for gradient in gradients]
    _train(optimizer, group, parameter, pieces)
    return parameter.gather() - values


def _movement(optimizer: Any, group: dict, start: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return by how much a new optimizer of the same class, with the options of `group`, moves `start`."""
    parameter = torch.nn.Parameter(start.clone())
    _train(optimizer, group, parameter, [gradient.clone() for gradient in gradients])
    return parameter.detach() - start


def _train(optimizer: Any, group: dict, parameter: torch.nn.Parameter, gradients: Sequence[torch.Tensor]) -> None:
    """Make a step of a new optimizer of the same class, with the options of `group`, with each gradient."""
    options = {**group, "params": [parameter]}
    if group.get("lr") is not None:  # at the start of a warm-up it may be 0
        options["lr"] = torch.full_like(group["lr"], _LR) if isinstance(group["lr"], torch.Tensor) else _LR
    accepted = inspect.signature(type(optimizer)).parameters
    anything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())
    given = {name: value for name, value in optimizer.defaults.items() if anything or name in accepted}
    twin: Any = type(optimizer)([options], **given)
    twin.checked = current_world().buffers.made, [[parameter]], []  # it is being checked
    for gradient in gradients:
        parameter.grad = gradient
        if inspect.signature(type(optimizer).step).parameters["closure"].default is inspect.Parameter.empty:
            twin.step(lambda: torch.zeros((), device=parameter.device))
        else:
            twin.step()
