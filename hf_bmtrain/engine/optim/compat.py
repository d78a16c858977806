"""Check that optimizers of any class can step over sharded parameters.

Users may create any torch optimizer over sharded parameters, or may have created one before the model was sharded. To
check all of them, `init_distributed` registers a hook that torch calls before every step of every optimizer. The hook
checks an optimizer before the first step, and again after the optimizer's parameter groups have changed or more
parameters were sharded. In every step, the hook also records the optimizer's settings in the collective log, a list of
this rank's operations that the ranks compare.
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
from ..sharding.parameter import DistributedParameter, is_part
from ..tensors.tensor import ShardTensor
from .adam import AdamOptimizer
from .runs import same_members
from .state import FullState, full_facts, full_state_of

_log = logging.getLogger("hf_bmtrain")
_ROWS, _COLUMNS, _CUT, _STEPS, _LR = 6, 8, 19, 3, 0.05
_PLAIN = (bool, int, float, str, type(None))


def check(optimizer: torch.optim.Optimizer) -> FullState | None:
    """Check that `optimizer` can step over its sharded parameters, if it has any. Collective: every rank must call it.

    The hook that `install` registers calls this before the optimizer's first step. Later, it calls this before a step
    only if the optimizer's parameters have changed, or more parameters were sharded, since the last call.

    Returns:
        The optimizer's FullState, which gathers and shards its state dicts; None if it has no sharded parameter.

    Raises:
        RuntimeError: the optimizer has parameters from before the model was sharded.
        RuntimeError: the optimizer has unsharded parameters whose gradients differ between the ranks.
        RuntimeError: the ranks' optimizers differ.
        TypeError: the optimizer updates sharded parameters differently from full ones, or does not support them.
    """
    parameters: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
    stale = [p for p in parameters if getattr(p, "sharded_elsewhere", False)]
    if stale:
        raise RuntimeError(
            f"{type(optimizer).__name__} has parameters from before the model was sharded ({len(stale)} of "
            f"{len(parameters)}). They are not in the model any more, so updating them would train nothing. Create the "
            "optimizer after auto_wrap, from model.parameters()."
        )
    slices = [p for p in parameters if isinstance(p, DistributedParameter)]
    full_state = full_state_of(optimizer)
    if not slices or full_state is None:
        return full_state
    world = current_world()
    world.check_same_on_all_ranks("optimizer.step", _facts(optimizer, world))
    _check_averaged(optimizer, [p for p in parameters if not isinstance(p, DistributedParameter)])
    # Try each group once, when it is new: later its options may contain state of the training, such as a step counter.
    new = [group for group in optimizer.param_groups if all(group is not each for each in full_state.checked_groups)]
    ours = type(optimizer).__module__.split(".")[0] == __name__.split(".")[0]  # these are known to work
    if new and not ours:
        _check_element_wise(optimizer, new, slices[0].device)
    full_state.checked_groups += new
    return full_state


def keeps_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step gives `optimizer` state. SGD without momentum, for example, never has any.

    New optimizers of the same class, one for each parameter group, make a step on a small matrix. If one of them
    raises an error, a warning with the error is logged, and the result is True. Not collective.

    Args:
        optimizer: the optimizer, which does not change.
    """
    for group in optimizer.param_groups:
        for first in group["params"][:1]:  # a group may be empty
            parameter = torch.nn.Parameter(torch.zeros(_ROWS, _COLUMNS, dtype=torch.float32, device=first.device))
            try:
                if _train(optimizer, group, parameter, [torch.ones_like(parameter)]).state:
                    return True
            except Exception as error:
                # An optimizer of another package may raise any error. Assume that it keeps state: the caller then
                # raises an error, whereas the opposite could write a checkpoint without the state.
                message = "%s could not be tested on a small matrix (%s), so it is assumed to keep state."
                _log.warning(message, type(optimizer).__name__, error)
                return True
    return False


def _check_averaged(optimizer: torch.optim.Optimizer, ordinary: Sequence[torch.nn.Parameter]) -> None:
    """Raise RuntimeError if the gradients of an optimizer's unsharded parameters differ between ranks.

    Only the sum and the shape of each gradient are compared. Collective: every rank must call it.

    ordinary: the optimizer's unsharded parameters.
    """
    world = current_world()
    if world.size == 1 or not ordinary:
        return
    # Compare strings, because NaN is not equal to itself.
    gradients = [None if p.grad is None else f"{p.grad.double().sum().item()} of {tuple(p.shape)}" for p in ordinary]
    everyone = world.gather_objects(gradients)
    if any(other != gradients for other in everyone):
        raise RuntimeError(
            f"{type(optimizer).__name__} has {len(ordinary)} parameters that are not sharded (the first has "
            f"shape {tuple(ordinary[0].shape)}). Their gradients differ between the ranks, because nothing averages "
            "them. Pass the outermost model, which contains them too, to auto_wrap, or average their gradients "
            "before step()."
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
    """If a full state was loaded since the last step, check that it is the same on all ranks, and then shard it.

    Collective: every rank must call it.

    full_state: the FullState of the optimizer, which does the sharding. It is not used for an AdamOptimizer, because
        `AdamOptimizer.load_state_dict` shards the state already.
    """
    facts = None
    if isinstance(optimizer, AdamOptimizer):
        # AdamOptimizer.load_state_dict has already sharded the state, so the full values are gone. It has stored their
        # hashes in `loaded_facts`. Set this attribute to None, so that the hashes are compared only once.
        facts, optimizer.loaded_facts = optimizer.loaded_facts, None
    elif full_state.is_loaded(optimizer) and optimizer.state:
        facts = full_facts((p, *item) for p, state in optimizer.state.items() for item in state.items())
    if facts is not None:
        current_world().check_same_on_all_ranks("optimizer.step after load_state_dict", facts)
    if not isinstance(optimizer, AdamOptimizer) and full_state.is_loaded(optimizer):
        full_state.shard_loaded(optimizer)


def install() -> Callable[[], None]:
    """Make torch's optimizers work with sharded parameters. `init_distributed` calls this.

    This function makes two changes:

    * It registers a hook, which torch calls before each step of every optimizer in this process. The hook does the
      following:

      * Before the optimizer's first step, and again after its parameters have changed or more parameters were sharded,
        it calls `check`, which raises an error if the optimizer would not train its parameters correctly, or differs
        between ranks.
      * Before each step of an optimizer with sharded parameters, it writes the learning rate, and every other numeric
        setting that has changed, to the collective log. The ranks compare their logs, and so find differences between
        their settings. (Of settings that are tensors, only a learning rate on the CPU is written. To read one on a GPU,
        the host would have to wait for the device.)
      * Before the first step after `optimizer.load_state_dict`, it checks that full tensors in the loaded state are the
        same on all ranks, and replaces them by this rank's elements. (`AdamOptimizer.load_state_dict` has already
        replaced them.)

    * It enables `foreach` for sharded parameters: torch's optimizers then pass lists of parameters to functions such as
      `torch._foreach_add_`, instead of updating the parameters one by one, which is slower.

    Returns:
        A function that undoes both changes.
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
    """Describe an optimizer by facts that must be equal on all ranks: {name of a fact: value}.

    The host waits for the device if an option is a tensor of one element, because its value is read.
    """
    groups = optimizer.param_groups
    facts: dict[str, Any] = {"class": type(optimizer).__qualname__, "number of parameter groups": len(groups)}
    facts["has state"] = bool(optimizer.state)
    if isinstance(optimizer, AdamOptimizer):
        facts |= optimizer._facts()
    for number, group in enumerate(groups):
        for name, value in group.items():
            if _is_plain(value) or (isinstance(value, torch.Tensor) and value.numel() == 1):
                facts[f"{name} of group {number}"] = value.item() if isinstance(value, torch.Tensor) else value
    for number, group in enumerate(groups):
        for position, parameter in enumerate(group["params"]):
            held = f"group {number}, shape {tuple(parameter.shape)}, requires_grad={parameter.requires_grad}"
            facts[_name_of(parameter, f"{position} of group {number}", world)] = held
    return facts


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(each, _PLAIN) for each in value))


def _name_of(parameter: Any, position: str, world: World) -> str:
    if not isinstance(parameter, DistributedParameter):
        return f"ordinary parameter {position}"
    buffer = parameter.buffer
    held = world.monitor.names.get(buffer.number, f"others in flat buffer {buffer.number}")
    name = parameter.index if parameter.origin is None else parameter.origin.path
    return f"parameter '{name}' (sharded together with {held})"


class _NotedOptions:
    """Records a parameter group's settings in the collective log, which the ranks compare to find differences.

    The learning rate is recorded in every step, and other numbers only when they change. Of settings that are tensors,
    only a learning rate on the CPU is recorded. To read one on a GPU, the host would have to wait for the device.
    """

    def __init__(self, group: dict[str, Any], collective_log: CollectiveLog) -> None:
        self._note = collective_log.note
        self._names = [name for name, value in group.items() if name != "lr" and _is_plain(value)]
        self._values = [*map(group.get, self._names)]

    def step(self, group: dict[str, Any]) -> None:
        """Record the settings of `group` for the optimizer's step in the collective log, which the ranks compare.

        The learning rate is recorded in every call, and other numbers only if they have changed.
        """
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


def _check_element_wise(optimizer: torch.optim.Optimizer, groups: Sequence[dict], device: torch.device) -> None:
    """Raise TypeError if `optimizer` would compute different updates for sharded parameters than for full ones.

    Collective: every rank must call it. For each of `groups`, there are two trials, in which new optimizers of the same
    class make a few steps on a small matrix. Their updates must equal those of one optimizer for the full matrix.

    1. Two optimizers each update a 1-D part of the matrix. Element-wise optimizers, which update each element from its
       own gradient and state alone, pass this trial. If the optimizer is one of torch.optim, it is then accepted
       without the second trial.
    2. One optimizer updates a sharded matrix. This trial decides about every optimizer that the first did not accept.
       Optimizers that are not element-wise, such as Adafactor, pass it if all functions of torch that they call return
       the same for the sharded matrix as for the full one. With tensor parallelism, they are refused without this
       trial if a parameter of the group is split.

    If a new optimizer cannot update even the full matrix, both trials are left out, and a warning is logged.

    groups: the parameter groups of `optimizer` whose options are tried.
    device: the device of the matrix.
    """
    # Every rank tries the same random values, so all ranks come to the same decision.
    generator = torch.Generator().manual_seed(0)
    shape = _STEPS + 1, _ROWS, _COLUMNS
    weights, *gradients = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(device)
    for group in groups:
        for dtype in (torch.float64, torch.float32):  # float64 is more exact, but some optimizers do not support it
            try:
                values, tries = weights.to(dtype), [gradient.to(dtype) for gradient in gradients]
                moved = _movement(optimizer, group, values, tries).view(-1)
                break
            except Exception as error:
                reason = error
        else:
            message = (
                "%s could not be tested on a small matrix (%s), so it is unknown whether it trains sharded parameters "
                "correctly. It does if it is element-wise like Adam, that is, if it updates each element from that "
                "element's own gradient and state only."
            )
            _log.warning(message, type(optimizer).__name__, reason)
            continue
        flat = functools.partial(_move_parts, optimizer, group, values.view(-1), [each.view(-1) for each in tries])
        parted = _difference(flat, moved)
        if parted is None and type(optimizer).__module__.startswith("torch.optim."):
            continue
        if parted is not None and any(is_part(parameter) for parameter in group["params"]):
            raise TypeError(
                f"{type(optimizer).__name__} computes with full matrices, but with tp_size some matrices are split, so "
                "that each rank has only a part. Use an element-wise optimizer, such as bmt.optim.AdamOptimizer or "
                "torch.optim.AdamW."
            )
        # Use a matrix that is large enough for every rank to store a part of it.
        shape = _STEPS + 1, _ROWS, _COLUMNS * current_world().size
        values, *tries = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(device, dtype)
        moved = _movement(optimizer, group, values, tries)
        reason = _difference(functools.partial(_move_local, optimizer, group, values, tries), moved)
        if reason is not None and parted is None:
            raise TypeError(
                f"{type(optimizer).__name__} does not work with sharded parameters ({reason}). Use an optimizer from "
                "torch.optim, or bmt.optim.AdamOptimizer, which keeps its state in 8 bits with state_bits=8."
            )
        if reason is not None:
            raise TypeError(
                f"{type(optimizer).__name__} depends on the shapes of parameters ({reason}), but after auto_wrap each "
                "rank stores only a part of each parameter. Use an element-wise optimizer (hf_bmtrain's AdamOptimizer, "
                "torch.optim.SGD, Adam, AdamW, RMSprop, Adagrad, Lion), or one that computes with full matrices in "
                "float32 through torch's own functions (Adafactor, LAMB, LBFGS). For Muon, use "
                "bmt.optim.MuonOptimizer(model)."
            )


def _difference(move: Callable[[], torch.Tensor], expected: torch.Tensor) -> str | None:
    """Run a trial of an optimizer. Return None if the result equals `expected`, otherwise describe the difference.

    A trial updates a small matrix, to find out whether the optimizer can update sharded parameters.

    Args:
        move: a function without arguments that runs the trial and returns the change of the weights. An error that it
            raises counts as a difference.
        expected: the change that is expected. Differences up to 0.1 % of its largest element are accepted.
    """
    try:
        moved = move()
    except Exception as error:
        first = str(error).strip().split("\n")[0]
        return f"in a test it raised {type(error).__name__}: {first}"
    difference = ((moved - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()
    if difference <= 1e-3:
        return None
    return f"its updates of a sharded matrix differ from those of the full one by up to {100 * difference:.2g} %"


def _move_parts(optimizer: Any, group: dict, values: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return how much the 1-D `values` change if two new optimizers each update a part of them.

    The caller compares the result with the change that a single optimizer makes. For an element-wise optimizer, both
    are the same. `values` is not modified.

    optimizer: the optimizer to test. The two new optimizers are of its class.
    group: the parameter group whose options the new optimizers get.
    gradients: for each step, a 1-D gradient of all values.
    """
    cuts = slice(None, _CUT), slice(_CUT, None)
    return torch.cat([_movement(optimizer, group, values[cut], [each[cut] for each in gradients]) for cut in cuts])


def _move_local(optimizer: Any, group: dict, values: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return how much the full `values` change if a new optimizer updates them as a sharded parameter.

    The caller compares the result with the change of a full parameter. Collective: every rank must call it.

    optimizer: the optimizer to test. The new optimizer is of its class.
    group: the parameter group whose options the new optimizer gets.
    gradients: for each step, the full gradient, of the shape of `values`.
    """
    parameter = DistributedParameter(values)
    pieces = [parameter.take(gradient).clone() for gradient in gradients]
    _train(optimizer, group, parameter, pieces)
    return parameter.gather() - values


def _movement(optimizer: Any, group: dict, start: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the total change of the weights `start` after a new optimizer has made one step for each gradient.

    Such changes are compared to find out whether an optimizer can update sharded parameters.

    optimizer: the optimizer to test. The new optimizer is of its class.
    group: the parameter group whose options the new optimizer gets.
    start: the weights, which are copied.
    gradients: for each step, a gradient of the shape of `start`; copied.
    """
    parameter = torch.nn.Parameter(start.clone())
    _train(optimizer, group, parameter, [gradient.clone() for gradient in gradients])
    return parameter.detach() - start


def _train(optimizer: Any, group: dict, parameter: torch.nn.Parameter, gradients: Sequence[torch.Tensor]) -> Any:
    """Update `parameter` once for each gradient, with a new optimizer of the same class and the options of `group`.

    Returns the new optimizer.

    optimizer: the optimizer to test, which does not change. The new optimizer is of its class.
    group: the parameter group whose options the new optimizer gets, except "params" and "lr".
    parameter: the parameter to update.
    gradients: for each step, the tensor that becomes the `.grad` of `parameter`.
    """
    # Options are cloned because the group may contain a step counter as a tensor, which the trial must not change.
    options = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in group.items()}
    options["params"] = [parameter]
    if group.get("lr") is not None:  # use a fixed rate: the group's rate may be 0 at the start of a warm-up
        options["lr"] = torch.full_like(group["lr"], _LR) if isinstance(group["lr"], torch.Tensor) else _LR
    accepted = inspect.signature(type(optimizer)).parameters
    anything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())
    given = {name: value for name, value in optimizer.defaults.items() if anything or name in accepted}
    twin: Any = type(optimizer)([options], **given)
    # Make `_before_step` treat `twin` as already checked. `checked` contains the number of flat buffers, the parameters
    # of each group, and the objects that record each group's options so that ranks can compare them (here, none).
    twin.checked = current_world().buffers.made, [[parameter]], []
    if callable(train := getattr(twin, "train", None)):  # schedule-free optimizers require this call before a step
        train()
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    for gradient in gradients:
        parameter.grad = gradient
        if closure is not None and closure.default is inspect.Parameter.empty:
            twin.step(lambda: torch.zeros((), dtype=torch.float32, device=parameter.device))
        else:
            twin.step()
    return twin
