"""Measure training speed and peak memory for Trainer's logs."""

from __future__ import annotations

import logging
import resource
import sys
import time
import weakref
from typing import Any

import torch
from transformers import Trainer

from ..engine.blocks.members import Members
from ..engine.blocks.observer import Observer
from ..engine.comm.streams import finish
from ..engine.runtime.world import World, current_world
from ..engine.sharding.parameter import DistributedParameter
from ..engine.wrap.accelerator import ranks_per_row

_log = logging.getLogger("hf_bmtrain")


class Speedometer(Observer):
    """Measures the speed of training: samples, tokens and FLOPs per second.

    BMTrainCallback creates a Speedometer when training begins, adds the result of `read` to Trainer's log entries, and
    calls `pause` and `resume` around evaluations and saves. A Speedometer is an observer. Until `close`, it counts the
    samples, tokens and FLOPs of each forward of the model in training mode with gradients enabled.

    The FLOPs are those that training of all parameters requires, without recomputation. Per token they are 6N for N
    parameters in matrix products, and 12·L·H·T for attention, with L layers, T tokens in the sequence, and H, the width
    of all attention heads of a layer together (Chowdhery et al., 2022, appendix B). FLOPs are not reported for mixtures
    of experts and encoder-decoders, for which the formula does not hold.

    Args:
        model: the model that is trained, sharded or not. It is referenced weakly.
    """

    position = 30

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        self._input = getattr(model, "main_input_name", "input_ids")
        self._weights, self._attention = _flops_a_token(model)
        self._handle = current_world().schedule.observe(self, model)
        self._samples = self._tokens = self._flops = 0.0
        self._since = time.perf_counter()
        self._paused: float | None = None

    def close(self) -> None:
        self._handle.remove()

    def before_forward(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if model is not self._model():
            return
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.dim()]
        if not (model.training and torch.is_grad_enabled() and tensors):
            return
        main = kwargs.get(self._input, args[0] if args else None)
        inputs = next((tensor for tensor in tensors if tensor is main), tensors[0])
        tokens = inputs.numel() if inputs is main and inputs.dim() == 2 else 0
        flops = tokens * (self._weights + self._attention * inputs.shape[-1])
        # `shared` ranks compute the same rows (sequences) together. Each of them runs this code, and adds 1 / shared of
        # the rows, so that `read`, which adds up the numbers of all ranks, counts each row once.
        shared = ranks_per_row(model)
        self._samples += len(inputs) / shared
        self._tokens += tokens / shared
        self._flops += flops / shared

    def pause(self) -> None:
        """Stop the clock until `resume`, so that evaluations and saves do not count as training time.

        The host first waits until the GPU has completed the steps that were launched, because they are training time.
        """
        if self._paused is None:
            finish(current_world().device)
            self._paused = time.perf_counter()

    def resume(self) -> None:
        if self._paused is not None:
            self._since += time.perf_counter() - self._paused
            self._paused = None

    def read(self) -> dict[str, float]:
        """Return entries for Trainer's log: speeds since the last call, and the largest peak memory of any rank.

        Collective: every rank must call it. The entries are samples_per_second and tokens_per_second of all ranks
        together, model_tflops_per_device, and peak_memory_gib. If tokens_per_second or model_tflops_per_device is
        unknown, it is left out. The host waits for the GPU, which may be steps behind.
        """
        world = current_world()
        counts = [self._samples, self._tokens, self._flops]
        totals = torch.tensor(counts, dtype=torch.float64, device=world.device)
        world.reduce.all_reduce(totals).wait()
        memory = torch.tensor([_peak_memory(world)], dtype=torch.float64, device=world.device)
        world.reduce.all_reduce(memory, maximum=True).wait()
        (samples, tokens, flops), peak = totals.tolist(), memory.item()
        now = time.perf_counter() if self._paused is None else self._paused
        seconds = max(now - self._since, 1e-9)
        self._since, self._samples, self._tokens, self._flops = now, 0.0, 0.0, 0.0
        report = {"samples_per_second": samples / seconds, "peak_memory_gib": peak / 2**30}
        if tokens:
            report["tokens_per_second"] = tokens / seconds
        if flops:
            report["model_tflops_per_device"] = flops / seconds / world.size / 1e12
        return {name: float(f"{value:.5g}") for name, value in report.items()}


def _flops_a_token(model: Any) -> tuple[float, float]:
    """Return (w, v): each token of a sequence of T tokens takes w FLOPs for the weights, and v · T FLOPs for attention.

    Both numbers are 0 if the FLOPs are unknown for this kind of model.
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    # Do not read these attributes if layers may have different values: the configuration would then raise an error.
    known = not getattr(config, "is_heterogeneous", False) and not getattr(config, "is_encoder_decoder", False)
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads")
    layers, width, heads = (getattr(config, name, None) if known else None for name in names)
    # Instead of a number, some configurations have a dict or a list with a number for each part of the model.
    several = any(isinstance(number, (dict, list, tuple)) for number in (layers, width, heads))
    if not layers or not width or several or _has_experts(model, config):
        _log.info(
            "%s: model_tflops_per_device is not reported, because the FLOPs per token of such a model are not known",
            type(model).__name__,
        )
        return 0.0, 0.0
    return 6.0 * ParameterCount(model)(exclude_embeddings=True), 12.0 * layers * _attention_width(config)


def _has_experts(model: torch.nn.Module, config: Any) -> bool:
    """Return whether `model` is a mixture of experts, in which each token uses only some of the weights.

    Configurations have different names for the number of experts. (That of DBRX is in the part `ffn_config`.) In
    transformers, most modules that contain experts have a method `_apply_gate`.
    """
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    parts = config, getattr(config, "ffn_config", None)
    told = any(getattr(part, name, None) for part in parts for name in names)
    return told or any(hasattr(module, "_apply_gate") for module in model.modules())


def _attention_width(config: Any) -> float:
    """Return the width of all attention heads of a layer together, which may differ from the hidden size.

    If values have a different width than queries and keys, return the mean of the two widths, because each is the width
    in one of the two matrix products of attention.
    """
    heads = getattr(config, "num_attention_heads", None)
    if heads and hasattr(config, "qk_head_dim"):
        return heads * (config.qk_head_dim + config.v_head_dim) / 2
    size = getattr(config, "head_dim", None)
    return heads * size if heads and size else config.hidden_size


class ParameterCount:
    """Counts the elements of a model's full parameters. Replaces `num_parameters` of models from transformers.

    Tied parameters count once. Weights that `tp_size` splits over ranks count in full.

    Trainer calls this object after each micro-batch, for its total_flos. The result rarely changes, but checking
    whether a module or parameter was added, removed or replaced takes time. So for Trainer, only every `KEPT`-th call
    checks this, and counts again if necessary. The calls in between return the last result. Calls by other code always
    check.

    Args:
        model: the model. It is referenced weakly.
    """

    KEPT = 20

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        self._members = Members()
        # For each parameter of `_members`: (its number of elements, whether only embedding modules contain it).
        self._numels: list[tuple[int, bool]] = []
        self._totals = (0, 0)  # elements of (all parameters, parameters that a non-embedding module contains)
        # The last count for Trainer, and how many more calls by Trainer return it without a check (see the class).
        self._answer, self._left = 0, 0

    def __call__(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Return the number of elements of the model's full parameters.

        Args:
            only_trainable: count only parameters that require a gradient.
            exclude_embeddings: leave out embeddings that are not tied to another layer.
        """
        if sys._getframe(1).f_code is not Trainer.floating_point_ops.__code__:
            return self._count(only_trainable, exclude_embeddings)
        if self._left == 0:
            self._answer, self._left = self._count(only_trainable, exclude_embeddings), self.KEPT
        self._left -= 1
        return self._answer

    def renew(self) -> None:
        """Forget the cached result, so that Trainer's next call checks whether modules or parameters have changed.

        Called when training begins, because the model may have changed since the last training, for example by adding
        adapters.
        """
        self._left = 0

    def _count(self, only_trainable: bool, exclude_embeddings: bool) -> int:
        model = self._model()
        assert model is not None, "the model was dropped"
        if self._members.update(model):
            self._search(model)
        if not only_trainable:
            return self._totals[bool(exclude_embeddings)]
        return sum(
            numel
            for parameter, (numel, looked_up) in zip(self._members.parameters(), self._numels)
            if parameter.requires_grad and not (exclude_embeddings and looked_up)
        )

    def _search(self, model: torch.nn.Module) -> None:
        embeddings, others = set(), set()
        for module in model.modules():
            (embeddings if isinstance(module, torch.nn.Embedding) else others).update(module._parameters.values())
        looked_up = embeddings - others
        self._numels = [(_numel(p), p in looked_up) for p in self._members.parameters()]
        embedded = sum(numel for numel, only_looked_up in self._numels if only_looked_up)
        total = sum(numel for numel, _ in self._numels)
        self._totals = (total, total - embedded)


def _numel(parameter: torch.nn.Parameter) -> int:
    """Return the number of elements of a full parameter. If tensor parallelism has split it, all its parts count."""
    if not isinstance(parameter, DistributedParameter):
        return parameter.numel()
    return parameter.buffer.storage.whole_shape(parameter.index).numel()


def _peak_memory(world: World) -> float:
    """Return the peak bytes of this rank's tensors on its GPU. On the CPU, the process's peak resident set size."""
    if world.device_memory is not None:
        return float(world.device_memory.peak())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
