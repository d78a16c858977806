"""`check_parity` compares one training step of a sharded model with plain torch, block by block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ...engine.base.pinned import available_bytes
from ...engine.runtime.world import World, current_world
from ...engine.sharding.parameter import DistributedParameter
from .outputs import Outputs, recorded, watched_modules
from .parity import Difference, Parity, largest_difference, largest_of, merge
from .plain import Wholes, gather_full_params, shown_plain
from .training_state import TrainingState

_BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}
_HALF_BOUND = 2e-2
"""The bound in 16 bits. Larger differences are possible if the plain step rounds intermediate results at different
points than the sharded step: both then differ from the exact results, and from each other, by up to 8e-2 (measured with
adapters larger than their frozen weights, in three layers in bfloat16)."""
_OF_MODEL = 0.2

MakeOptimizer = Callable[[list[Any]], torch.optim.Optimizer]


def check_parity(
    model: torch.nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: MakeOptimizer | None = None,
    bound: float | None = None,
    verbose: bool = True,
) -> Parity:
    """Compare one training step of a wrapped model with the same step in plain torch, and print a table of differences.

    Use it to check that a wrapped model computes the same as without this library and, if it does not, to find the
    first block that differs.

    Collective: every rank must call it. Both steps run on this rank's `batch`, in the model's current mode (dropout
    included), from the same random states:

    * The sharded step runs the wrapped model. Its backward recomputes no block if use_checkpoint is False, or "auto" on
      the CPU. With any other use_checkpoint, it recomputes every block completely. (In training, "attention" keeps some
      activations, and so may "auto" on a GPU.)
    * The plain step runs the model's own code on full copies of the weights, without all-gathers, reductions,
      recomputation or compiled blocks. LoRA layers, experts, their adapters and MLPs with `mlp_chunks` run the original
      forwards of transformers and PEFT.

    Float8 layers and the loss of `fuse_causal_loss` run the same code in both steps, so the comparison cannot
    find errors in that code. Neither step runs the hooks that were registered by
    `parameter.register_post_accumulate_grad_hook`; `Parity.unrun_hooks` contains their number.

    The comparison covers the outputs of every block, and of every module with parameters outside blocks; the loss; each
    parameter's gradient; and the weight update of one optimizer step. The sharded step's gradients are compared with
    the plain step's, averaged over the ranks. For the update, one new optimizer steps the shards and another steps the
    full copies. Both use the gradients of the sharded step, so that wrong gradients do not change this comparison.

    Afterwards weights, gradients, buffers, attributes and random generators are as before, even if this function
    raises an error. Tensors that are neither parameters nor buffers are not restored if the model modifies them in
    place. During the comparison every rank needs memory for two full copies of the weights, one full copy of the
    gradients, and the optimizer's state for full weights.

    Args:
        model: the wrapped model.
        batch: the model's keyword arguments as a mapping, its positional arguments as a tuple or list, or its only
            argument. Each rank passes its own batch.
        loss: a function of the model's output that returns the scalar loss. None uses the output's `loss` or, if the
            output is a tensor, the output itself.
        optimizer: a function that returns an optimizer for a list of parameters, such as
            `functools.partial(torch.optim.AdamW, lr=1e-3)`. None uses SGD with lr=0.1.
        bound: the allowed relative difference, 0 or more. An element may differ by at most `bound` times a reference,
            which is computed from the plain step. For an output or update, the reference is its largest magnitude. For
            a gradient, the reference is its largest magnitude plus a fifth of the largest magnitude in all gradients.
            An update may differ by one rounding error more: the weight's largest magnitude times the eps of its dtype.
            If `bound` is None, it is 1e-10 in float64, 1e-5 in float32, and 2e-2 if weights, outputs or autocast are in
            16 bits. In 16 bits, correct LoRA layers may exceed it, because their original forward rounds intermediate
            results at different points; compare such a model in float32.
        verbose: whether to print the table on rank 0.

    Returns:
        A `Parity`, the same on every rank. Its `ok` is True if no difference is larger than allowed. Its `first` is the
        first difference that is larger than allowed, or None. Such a difference raises no error.

    Raises:
        RuntimeError: a rank has too little memory for the full copies. The message gives the bytes.
        RuntimeError: the ranks called different modules, or passed different values of `bound`.
        ValueError: the model is not wrapped, no scalar loss was found, or `bound` is negative.
        NotImplementedError: `init_distributed` was called with a `tp_size` above 1.
        TypeError: `model` is not a module, or `optimizer` is not a function.

    Example::

        assert bmt.check_parity(model, batch).ok
    """
    world = current_world()
    _check_arguments(model, optimizer, bound)
    world.check_same_on_all_ranks("check_parity", {"bound": bound})
    sharded_params = [p for p in dict.fromkeys(model.parameters()) if isinstance(p, DistributedParameter)]
    if not sharded_params:
        raise ValueError(f"check_parity needs a wrapped model. Call bmt.auto_wrap on {type(model).__name__} first.")
    if world.grid is not None:
        raise NotImplementedError(
            "check_parity does not support tp_size, because no rank then computes full layers. Compare the model with "
            "an unwrapped one that has loaded model.state_dict()."
        )
    world.raise_everywhere("check_parity needs the full model on every rank", _shortage(sharded_params, world))
    comparison = _Comparison(model, world, bound)
    state, stepped = TrainingState(model, world), False
    try:
        watched = watched_modules(model)
        with recorded(watched, world.schedule) as sharded:
            mine = _run(model, batch, loss)
        state.rewind()
        full_params = gather_full_params(model)
        with recorded(watched, world.schedule) as plain, shown_plain(model, full_params):
            expected = _run(model, batch, loss)
        comparison.of_outputs(sharded, plain, mine, expected)
        comparison.of_gradients(full_params)
        stepped = True
        comparison.of_update(full_params, optimizer or partial(torch.optim.SGD, lr=0.1))
    finally:
        state.restore(weights=stepped)
    losses, hooks = zip(*world.gather_objects((float(expected), state.hooks)))
    parity = Parity(merge(world.gather_objects(comparison.differences)), sum(losses) / world.size, max(hooks))
    if verbose and world.rank == 0:
        print(parity)
    return parity


def _check_arguments(model: Any, optimizer: Any, bound: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"check_parity(model, batch): model must be a torch.nn.Module, got type {type(model).__name__}")
    if isinstance(optimizer, torch.optim.Optimizer) or not (optimizer is None or callable(optimizer)):
        raise TypeError(
            "check_parity: optimizer must be a function that returns an optimizer for a list of parameters, such as "
            f"functools.partial(torch.optim.SGD, lr=0.1), got type {type(optimizer).__name__}. It is called once for "
            "the shards and once for the full weights."
        )
    if bound is not None and not bound >= 0:
        raise ValueError(f"check_parity: bound must be 0 or more, or None, not {bound}")


def _run(model: Any, batch: Any, loss: Callable[[Any], torch.Tensor] | None) -> torch.Tensor:
    """Run forward and backward of `model` on a batch, and return the loss, detached.

    Raises ValueError if no loss with one element is found.

    batch: the model's keyword arguments as a mapping, its positional arguments as a tuple or list, or its only
        argument.
    loss: a function of the model's output that returns the loss. None uses the output's `loss` or, if the output is a
        tensor, the output itself.
    """
    with torch.enable_grad():
        if isinstance(batch, Mapping):
            outputs = model(**batch)
        else:
            outputs = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
        value = outputs if loss is None and isinstance(outputs, torch.Tensor) else getattr(outputs, "loss", None)
        if loss is not None:
            value = loss(outputs)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise ValueError(
                "check_parity needs a loss that is a tensor with one element, but did not get one from the "
                f"{type(outputs).__name__} that the model returned. Put labels into the batch, or pass a function "
                "loss= that takes the model's output and returns such a tensor."
            )
        value.backward()
    return value.detach()


def _shortage(sharded_params: Sequence[DistributedParameter], world: World) -> str | None:
    """Return an error message if this rank has too little memory for the full weights, and None if it has enough.

    The memory must suffice for two full copies of the weights, and for full gradients.

    sharded_params: the sharded parameters of the model that is to be compared.
    world: the ranks over which it is sharded.
    """
    needed = 3 * sum(sharded.numel() * sharded.element_size() for sharded in sharded_params)
    memory = world.device_memory
    if memory is None:
        free, where = available_bytes() // world.size, f"of host memory for each of {world.size} ranks"
    else:
        free, where = memory.usable() - memory.allocated(), f"of {world.device}"
    if needed <= free:
        return None
    return (
        f"copies of weights and gradients need {needed / 2**30:.3g} GiB, but only {free / 2**30:.3g} GiB {where} are "
        "left. Use a model of the same class with fewer layers, or a machine with more memory"
    )


class _Comparison:
    """Compares one step of the sharded model with the same step in plain torch, and collects this rank's differences.

    Call `of_outputs`, `of_gradients` and `of_update`, in this order, on all ranks.

    model: the wrapped model.
    world: the ranks over which it is sharded.
    bound: the allowed relative difference; None selects one by dtype.
    differences: one Difference for each item compared so far: a call of a module, the loss, a gradient or an update.
    """

    def __init__(self, model: torch.nn.Module, world: World, bound: float | None) -> None:
        self._model, self._world, self._bound = model, world, bound
        self.differences: list[Difference] = []
        self._names = {p: name for name, p in model.named_parameters() if isinstance(p, DistributedParameter)}

    def _allowed(self, tensor: torch.Tensor) -> float:
        """Return the allowed relative difference of `tensor`: the user's bound or, if that is None, a default.

        The default depends on the dtypes of `tensor` and of the weights, and on whether autocast is used.
        """
        if self._bound is not None:
            return self._bound
        device, accelerator = self._world.device.type, self._world.accelerator
        dtypes = {tensor.dtype, *(sharded.dtype for sharded in self._names if sharded.is_floating_point())}
        if (
            torch.is_autocast_enabled(device)
            or (accelerator is not None and str(accelerator.mixed_precision) != "no")
            or any(dtype.itemsize == 2 for dtype in dtypes)
        ):
            return _HALF_BOUND
        return max(_BOUNDS.get(dtype.to_real(), 1e-5) for dtype in dtypes)

    def _add(self, kind: str, block: str, name: str, got: torch.Tensor, wanted: torch.Tensor, allowed: float) -> None:
        """Add the Difference between `got`, a tensor of the sharded step, and `wanted`, the plain step's tensor.

        kind: "output" or "update".
        block, name: the names of the block and of the module or parameter to which the tensor belongs; "" for the loss.
        allowed: the largest absolute difference that is allowed.
        """
        self.differences.append(Difference(kind, block, name, largest_difference(got, wanted), allowed))

    def of_outputs(self, sharded: Outputs, plain: Outputs, mine: torch.Tensor, expected: torch.Tensor) -> None:
        """Compare the recorded outputs of the modules, and the losses, of the two steps.

        Args:
            sharded: the outputs that were recorded in the sharded step.
            plain: the outputs that were recorded in the plain step.
            mine: the loss of the sharded step.
            expected: the loss of the plain step.
        """
        for block, name in dict.fromkeys([*plain, *sharded]):
            got, wanted = sharded.get((block, name), []), plain.get((block, name), [])
            allowed = max((self._allowed(tensor) * largest_of(tensor) for tensor in wanted), default=0.0)
            differences = [largest_difference(a, b) for a, b in zip(got, wanted)]
            if len(got) != len(wanted) or ((block, name) in sharded) != ((block, name) in plain):
                differences = [float("inf")]  # the module ran in one step only, or the numbers of tensors differ
            self.differences.append(Difference("output", block, name, max(differences, default=0.0), allowed))
        self._add("output", "", "", mine, expected, self._allowed(expected) * largest_of(expected))

    @torch.no_grad()
    def of_gradients(self, full_params: Wholes) -> None:
        """Compare each gradient of the sharded step with the mean over ranks of the plain step's gradients.

        Collective: every rank must call it. Afterwards `.grad` of each full parameter is the all-gathered gradient of
        the sharded step (or None), so that `of_update` gives both optimizers the same gradients.

        full_params: {local parameter: full parameter}, with the plain step's gradients in `.grad`.
        """
        found = []
        for sharded, full in reversed(full_params.items()):
            got, wanted = sharded.gather_gradient(), self._mean(full)
            full.grad = got
            if wanted is not None or got is not None:
                nothing = full.detach().new_zeros(1).expand_as(full)  # a missing gradient counts as zeros
                got, wanted = nothing if got is None else got, nothing if wanted is None else wanted
                found.append((sharded, largest_difference(got, wanted), largest_of(wanted), self._allowed(wanted)))
        floor = _OF_MODEL * max((largest for _, _, largest, _ in found), default=0.0)
        for sharded, difference, largest, bound in found:
            name = self._names[sharded]
            self.differences.append(
                Difference("gradient", self._block(sharded), name, difference, bound * (largest + floor))
            )

    def _mean(self, full: torch.nn.Parameter) -> torch.Tensor | None:
        """Return the mean of `full.grad` over ranks, in float32 or wider; None if no rank has a gradient.

        Collective: every rank must call it.

        full: the full copy of a sharded parameter, with the gradient of the plain step in `.grad`.
        """
        present = torch.tensor([float(full.grad is not None)], dtype=torch.float32, device=self._world.device)
        self._world.reduce.all_reduce(present, maximum=True).wait()
        if not present.item():
            return None
        wide = torch.promote_types(full.dtype, torch.float32)
        total = torch.zeros_like(full, dtype=wide) if full.grad is None else full.grad.to(wide, copy=True)
        total = total.contiguous()
        real = torch.view_as_real(total) if total.is_complex() else total
        self._world.reduce.all_reduce(real.view(-1)).wait()
        return total / self._world.size

    def of_update(self, full_params: Wholes, make: MakeOptimizer) -> None:
        """Make a step with one optimizer on the shards, and with another on full parameters. Compare their updates.

        Collective: every rank must call it.

        Args:
            full_params: {local parameter: full parameter}. The `.grad` of each full parameter is the full gradient that
                the sharded model has computed.
            make: a function that returns an optimizer for a list of parameters.
        """
        trained = [sharded for sharded in full_params if sharded.requires_grad]
        before = {sharded: full_params[sharded].detach().clone() for sharded in trained}
        if not trained:
            return
        make(list(trained)).step()
        make([full_params[sharded] for sharded in trained]).step()
        with torch.no_grad():
            for sharded in trained:
                with sharded.buffer.unsharded():
                    got, wanted = sharded.full - before[sharded], full_params[sharded] - before[sharded]
                rounding = torch.finfo(sharded.dtype).eps * largest_of(before.pop(sharded))
                allowed = self._allowed(wanted) * largest_of(wanted) + rounding
                self._add("update", self._block(sharded), self._names[sharded], got, wanted, allowed)

    def _block(self, sharded: DistributedParameter) -> str:
        """Return the name of the block that contains `sharded`, or the parameter's own name if it is outside blocks."""
        name, origin = self._names[sharded], sharded.origin
        return name if origin is None or not origin.block else origin.block
