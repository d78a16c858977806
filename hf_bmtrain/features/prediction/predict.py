"""`predict_memory`, which predicts the memory of a training step and later compares it with the measured memory."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ...engine.blocks.observer import Observer
from ...engine.optim.adam import AdamOptimizer
from ...engine.runtime.world import current_world
from ..options import KeepFrozen, UseCheckpoint, UseFloat8
from .prediction import Prediction, predict
from .simulation import on_meta

_log = logging.getLogger("hf_bmtrain")
TOLERANCE = 0.05
"""The relative difference between predicted and measured peak above which a warning is logged."""


def predict_memory(
    model: torch.nn.Module,
    batch: dict[str, Any],
    make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] = AdamOptimizer,
    *,
    zero_level: int | None = None,
    use_checkpoint: UseCheckpoint = True,
    micro_batches: int = 1,
    keep_frozen: KeepFrozen = "auto",
    quantize_frozen: str | None = None,
    float8: UseFloat8 = False,
    offload_activations: bool = False,
    mlp_chunks: int = 1,
    sequence_parallel: int = 1,
) -> Prediction:
    """Predict the memory that a training step takes on each rank. Call it after `init_distributed`, before `auto_wrap`.

    Training is simulated on a copy of the model on torch's meta device, whose tensors have shapes but no values. Pass
    the arguments with which `auto_wrap` and the optimizer will be called. Not collective: a single rank may call it.

    If this rank then trains the same model on a GPU, the prediction is also checked: when the third step begins, the
    predicted peak is logged with the measured peak of the second step. If they differ by more than 5 %, a warning is
    logged that contains the predicted table. The message of an out-of-memory error contains the table too.

    Args:
        model: the model before it is wrapped, on any device. It is not changed.
        batch: the keyword arguments of the model's forward for one micro-batch of one rank, with the labels, so that
            the output has a `loss`. Only the shapes and dtypes of its tensors are used.
        make_optimizer: a function that returns the optimizer for a list of parameters, such as
            `functools.partial(torch.optim.SGD, momentum=0.9)`. It is called with the sharded parameters of the copy
            that require a gradient. The default is this library's AdamW.
        zero_level: as for `auto_wrap`.
        use_checkpoint: as for `auto_wrap`.
        micro_batches: the number of micro-batches (forwards and backwards) per step.
        keep_frozen: as for `auto_wrap`.
        quantize_frozen: as for `auto_wrap`.
        float8: as for `auto_wrap`.
        offload_activations: as for `auto_wrap`.
        mlp_chunks: as for `auto_wrap`.
        sequence_parallel: as for `auto_wrap`. `batch` must contain all tokens of its sequences, not only those of one
            rank.

    Returns:
        A `Prediction`, whose `str` is a table.

    Raises:
        TypeError: a setting has the wrong type.
        ValueError: a setting is out of range.
        ValueError: the model is already wrapped.
        ValueError: the model's output has no loss.
        RuntimeError: the forward needs values of tensors, which the meta device does not have: for `nonzero`,
            `tolist` or indexing by a mask, for example. (`item` raises no error: it returns 0, or a bool.)
    """
    world = current_world()
    if any(hasattr(parameter, "buffer") for parameter in model.parameters()):
        raise ValueError("predict_memory: this model is already wrapped. Call predict_memory before auto_wrap.")
    if micro_batches < 1:
        raise ValueError(f"predict_memory: micro_batches must be 1 or more, not {micro_batches}.")
    on_device = world.device.type != "cpu"
    total = torch.get_device_module(world.device).mem_get_info(world.device)[1] if on_device else 1 << 62
    prediction = predict(
        on_meta(model).train(), batch, make_optimizer, ranks=world.shard_group.size, total=total,
        micro_batches=micro_batches, zero_level=world.zero_level if zero_level is None else zero_level,
        use_checkpoint=use_checkpoint, keep_frozen=keep_frozen, quantize_frozen=quantize_frozen, float8=float8,
        offload_activations=offload_activations, mlp_chunks=mlp_chunks, sequence_parallel=sequence_parallel,
    )  # fmt: skip
    if on_device:
        world.schedule.observe(Comparison(prediction, micro_batches, model), model)
    return prediction


class Comparison(Observer):
    """Measures the peak memory of the second training step, and logs it with the predicted peak.

    As an observer, it is called before each forward of the model.

    Args:
        prediction: the prediction for one training step of the model.
        micro_batches: the number of forwards per step.
        model: the model. Only its training forwards count.
    """

    position = 20

    def __init__(self, prediction: Prediction, micro_batches: int, model: torch.nn.Module) -> None:
        self._prediction, self._micro_batches, self._forwards = prediction, micro_batches, 0
        self._model = weakref.ref(model)

    def before_forward(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if model is not self._model() or not (model.training and torch.is_grad_enabled()):
            return
        steps, rest = divmod(self._forwards, self._micro_batches)
        self._forwards += 1
        world = current_world()
        memory = world.device_memory
        if rest or not 1 <= steps <= 2 or memory is None:
            return
        if steps == 1:  # measure the second step: the first one begins without optimizer state
            memory.reset_peak()
        else:
            self.report(memory.peak() + world.schedule.mapped_bytes)

    def out_of_memory(self) -> str | None:
        return f"predict_memory predicted this for a step:\n{self._prediction}" if self._forwards else None

    def report(self, measured: int) -> None:
        """Log the predicted peak and the peak `measured`, in bytes. Warn if they differ by more than TOLERANCE."""
        predicted = self._prediction.peak
        difference = predicted / measured - 1
        line = "peak memory of a step: %.2f GiB predicted, %.2f GiB measured (%+.1f %%)"
        values = predicted / 2**30, measured / 2**30, 100 * difference
        if abs(difference) > TOLERANCE:
            _log.warning(
                f"predict_memory was wrong about the {line}. Training is not affected. Check that predict_memory was "
                "called with the same batch shapes, optimizer and options as the training. Its prediction:\n%s",
                *values, self._prediction,
            )  # fmt: skip
        else:
            _log.info(line, *values)
