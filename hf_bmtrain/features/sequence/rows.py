"""SharedRows: hooks on the forwards of a model and its blocks that make the ranks of a group share rows.

A row is a sequence of the batch. The model itself gets the whole row: it embeds all tokens, and makes positions and
masks for all of them. A hook before each block selects this rank's tokens, and the rest of the model (blocks, head,
loss, and usually the last norm) processes only these. So the hooks do not depend on how a model computes its
embeddings and masks.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...engine.base.checksums import digest
from ...engine.base.torch_internals import disable_compiler, pytree
from ...engine.runtime.world import current_world
from .attention import ROW, Row, register
from .choose import attentions_of, loss_kind, reads_mask_in_loss, sets_shape
from .exchange import gather_tokens, mean_over_group
from .parts import Parts

_log = logging.getLogger("hf_bmtrain")
_log_once = functools.cache(_log.info)
_IGNORED = -100
_COUNT = "num_items_in_batch"
_CACHES = ("cache", "past_key_values")
"""The names of the arguments by which models from transformers, and their blocks, get a key-value cache."""
_DIVIDED = {
    "", "logits", "prediction_logits", "last_hidden_state", "hidden_states", "log_probs", "entropy", "is_top1",
    "label_mask", "log_sum_sq_probs", "mean_logits",
}  # fmt: skip
"""Names of outputs (of transformers and TRL) that each rank has only for its own tokens; "" is an unnamed output.

After the forward, they are gathered for all tokens."""
_ROTARY = ("position_embeddings", "freqs", "rotary", "cos", "sin")
_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD


class SharedRows:
    """Hooks on a model that make each group of `size` consecutive ranks share the rows (sequences) of its batches.

    All ranks of a group must get the same batch. In the blocks, each rank processes only a part of each row's tokens.
    The outputs that the model returns, such as the logits, have all tokens again. (A training forward with labels
    returns no logits.)

    Attributes:
        size: the number of ranks in a group.
    """

    def __init__(self, model: torch.nn.Module, size: int) -> None:
        """Open communicators for the groups of ranks that share rows, and register hooks around the forward of `model`.

        Collective: every rank must call it.

        model: the outermost module, which is passed to `follow`. Call `watch` to register the hooks on its blocks.
        size: the number of ranks in a group, which share the rows (sequences) of a batch.
        """
        self.size, self._rank = size, current_world().rank % size
        current_world().open_group(size)
        self._parts: Parts | None = None  # the division of the tokens among the ranks in the last forward
        self._active: Parts | None = None  # the division in the forward that is running; None outside forwards
        self._weight: Tensor | None = None  # the factor by which `_after_forward` multiplies this rank's loss, if any
        self._as_tuple = self._in_training = False
        self._rows = 0
        self._handles: list[Any] = []
        self._configs: list[Any] = []  # the configurations that name the attention function of the watched blocks
        self.follow(model)

    def follow(self, model: torch.nn.Module) -> None:
        """Register the hooks that run before and after the forward of `model`, the outermost module.

        The hook before the forward checks the arguments, decides which tokens this rank processes, and selects the
        labels of these tokens. The hook after the forward averages the loss over the ranks of the group, and
        gathers the outputs, such as the logits, for all tokens. (After a training forward with labels, it drops the
        logits instead.)

        Called by the constructor, and again when `auto_wrap` shards adapters that were added later. PEFT may by then
        have put the model inside a PeftModel, which is the outermost module now. So this method first removes the hooks
        that it registered in its previous call.

        This method also makes `generate` of `model` and of all modules in it raise an error. Generation needs a cache
        of the keys and values of all tokens, but each rank computes those of its own tokens only.
        """
        for handle in self._handles:
            handle.remove()
        self._handles = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward, always_call=True),
        ]
        for module in model.modules():
            if callable(getattr(module, "generate", None)):
                module.generate = _refuse_generate  # pyright: ignore[reportArgumentType]

    def watch(self, layers: Sequence[torch.nn.Module], trunk: torch.nn.Module) -> None:
        """Register hooks on the blocks, so that the blocks process only this rank's part of each row's tokens.

        Before each block, a hook selects this rank's tokens in the block's arguments. So the output of the last block
        has only this rank's tokens, and so has the output of most trunks.

        Some trunks, such as GPT-2's, reshape the output of the last block to the shape of the trunk's own input, which
        has all tokens. For such a trunk, a hook after the last block pads the output with zeros in the places of the
        other ranks' tokens. A hook after `trunk` removes these places again from the hidden states that `trunk`
        returns.

        Args:
            layers: the blocks, in execution order.
            trunk: the module whose forward calls these blocks.
        """
        for layer in layers:
            attentions = attentions_of(layer)
            self._configs += [each.config for each in attentions if each.config not in self._configs]
            hook = functools.partial(self._before_layer, attentions)
            layer.register_forward_pre_hook(hook, with_kwargs=True)
        trunk.register_forward_pre_hook(self._before_trunk, with_kwargs=True)
        if sets_shape(trunk):
            layers[-1].register_forward_hook(self._after_last_layer)
        # If the trunk is the outermost module, it also has the hook `_after_forward`, before which `_after_trunk` must
        # run.
        trunk.register_forward_hook(self._after_trunk, prepend=True)

    # -- before the forward ---------------------------------------------------------------------------------------

    @disable_compiler  # torch.compile must not trace the hooks if the user compiles the model
    def _before_forward(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore
        given = _by_name(model, base, args, kwargs)
        row = next((given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None), None)
        if row is None or row.dim() < 2:
            raise NotImplementedError(
                f"sequence_parallel: {type(base).__name__} must be called with input_ids or inputs_embeds of shape "
                "(rows, tokens, ...), but was called with the arguments "
                f"{sorted(name for name, value in given.items() if value is not None)}."
            )
        _refuse_arguments(base, given)
        for config in self._configs:  # repeat this, because the user may have called `set_attn_implementation` since
            config._attn_implementation_internal = register(config._attn_implementation)
        rows, length = row.shape[:2]
        if length < self.size:
            raise ValueError(
                f"sequence_parallel={self.size}: a row of {length} tokens is too short for {self.size} ranks, each of "
                "which needs at least one token. Use longer sequences, or a smaller sequence_parallel."
            )
        self._check_same_rows(row, given.get("labels"))
        parts = self._parts
        if parts is None or parts.length != length:
            parts = Parts(length, self.size, self._rank)
        self._parts = self._active = parts
        self._in_training, self._weight, self._rows = torch.is_grad_enabled(), None, rows
        if "use_cache" in inspect.signature(base.forward).parameters:
            given["use_cache"] = False
        self._as_tuple = given.get("return_dict", getattr(base.config, "return_dict", True)) is False
        if self._as_tuple:
            given["return_dict"] = True
        if given.get("labels") is not None:
            self._divide_labels(base, given, rows, parts)
        return (), given

    def _divide_labels(self, base: Any, given: dict[str, Any], rows: int, parts: Parts) -> None:
        """Replace the labels of all tokens in `given` by the labels of this rank's tokens.

        `_after_forward` averages the losses of the ranks. So that this mean is the loss of the whole rows (sequences),
        this method also does one of two things, depending on the model:

        * If the model divides the sum of its labels' losses by `num_items_in_batch`, divide this argument in `given` by
          the number of ranks in the group. (If it was not given, use the number of labels in the whole rows.)
        * If the model always computes a mean over its labels, set `self._weight`, by which `_after_forward` multiplies
          this rank's loss.

        base: the model, without PEFT's wrapper.
        given: the arguments of its forward, {name: value}. Changed in place.
        rows: the number of rows of the batch.
        parts: the division of a row's tokens among the ranks.
        """
        labels, kind, name = given["labels"], loss_kind(base), type(base).__name__
        if tuple(labels.shape) != (rows, parts.length):
            raise NotImplementedError(
                f"sequence_parallel: {name} got labels of shape {tuple(labels.shape)}, but its input has shape "
                f"{(rows, parts.length)}. Only losses with one label for each token are supported. For another loss, "
                "call the model without labels, and compute the loss from its outputs."
            )
        if kind is None:
            raise NotImplementedError(
                f"sequence_parallel: the loss that {name} computes from labels is not supported, because it is neither "
                "one of the known loss functions of transformers nor a mean over labels. Call the model without "
                "labels, and compute the loss from its outputs, which contain all tokens."
            )
        if given.get("attention_mask") is not None and reads_mask_in_loss(base):
            raise NotImplementedError(
                f"sequence_parallel: the loss of {name} is a mean over the tokens that attention_mask allows, of which "
                "each rank has only a part. Call the model without labels, and compute the loss from its outputs."
            )
        targets = labels
        ignored = _IGNORED if kind == "mean" else given.get("ignore_index", _IGNORED)
        if kind == "shifted":
            targets = given.get("shift_labels")
            if targets is None:
                targets = torch.nn.functional.pad(labels, (0, 1), value=ignored)[:, 1:]
            given["shift_labels"] = parts.take(targets, 1).contiguous()
        present_in_rows = targets.ne(ignored).sum()
        given["labels"] = own = parts.take(labels, 1).clone()
        if kind != "mean":
            # The model divides the sum of this rank's losses by `num_items_in_batch`. The results of the group's ranks
            # are then averaged, that is, added and divided by `parts.size`. To divide by `count` in total, pass
            # `count / parts.size` to the model.
            count = given.get(_COUNT)
            given[_COUNT] = (present_in_rows if count is None else count) / parts.size
            return
        # This model always computes a mean over its labels, and ignores `num_items_in_batch`. So weight this rank's
        # mean by its share of the labels. `parts.size` cancels the division in the mean over the group's ranks.
        present = own.ne(_IGNORED).sum()
        self._weight = present * parts.size / present_in_rows.clamp(min=1)
        # If this rank has no labels, the mean would be nan. So give it one label: the factor `self._weight` is 0 then.
        own[0, 0] = torch.where(present == 0, 0, own[0, 0])

    def _check_same_rows(self, row: Tensor, labels: Tensor | None) -> None:
        """Raise RuntimeError if the ranks of the group, which share rows (sequences), got different rows or labels.

        Collective: every rank of the group must call it.

        row: the model's `input_ids` or `inputs_embeds`, (rows, tokens, ...). The values of `inputs_embeds`, which are
            not integers, are not compared.
        labels: the labels of all tokens, or None.
        """
        if row.is_meta:  # a memory prediction on the meta device, without values to compare
            return
        facts = [torch.tensor([*row.shape[:2]], device=row.device)]
        for tensor in (row, labels):
            whole = tensor is not None and not tensor.is_floating_point()
            facts.append(digest(tensor) if whole else facts[0].new_zeros(1))  # pyright: ignore[reportArgumentType]
        mine = torch.cat(facts)
        everyone = mine.new_empty(self.size * len(mine))
        current_world().open_group(self.size).all_gather(everyone, mine).wait()
        found = everyone.view(self.size, -1).tolist()
        if any(each != found[0] for each in found):
            shapes = ", ".join(str(tuple(each[:2])) for each in found)
            raise RuntimeError(
                f"sequence_parallel={self.size}: {self.size} consecutive ranks must get the same rows and labels, but "
                f"these ranks got different ones. Their numbers of (rows, tokens) are {shapes}; if all are equal, the "
                "contents differ. With Trainer, pass callbacks=[bmt.hf.BMTrainCallback()], and for an IterableDataset "
                "accelerator_config={'dispatch_batches': False}. With Accelerate, create the Accelerator before "
                f"auto_wrap. In your own training loop, let rank r read the data of rank r - r % {self.size}: "
                f"DistributedSampler(data, num_replicas=world_size() // {self.size}, rank=rank() // {self.size})."
            )

    # -- blocks -------------------------------------------------------------------------------------------------

    @disable_compiler
    def _before_trunk(self, trunk: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        """Keep only this rank's image features in the arguments of `trunk`, the module that calls the blocks.

        In models such as Qwen3-VL, `trunk` adds image features ("deepstack") to the hidden states of the image tokens
        after each of the first blocks. On this rank, these hidden states have only the rank's own tokens, so the
        features of other tokens must be left out.
        """
        parts = self._active
        names = [name for name, value in kwargs.items() if "deepstack" in name and value is not None]
        if parts is None or not names:
            return None
        mask: Any = kwargs.get("visual_pos_masks")
        if names != ["deepstack_visual_embeds"] or mask is None or tuple(mask.shape) != (self._rows, parts.length):
            raise NotImplementedError(
                f"sequence_parallel: {type(trunk).__name__} was called with {', '.join(names)}, which it adds to the "
                "hidden states of all tokens between its blocks, but each rank has only a part of the tokens. Call the "
                "model without images, or wrap it without sequence_parallel."
            )
        own = torch.zeros_like(mask)
        parts.take(own, 1).copy_(parts.take(mask, 1))
        kept = own[mask]  # for each feature, whether it belongs to one of this rank's tokens
        features = [each[kept.to(each.device)] for each in kwargs["deepstack_visual_embeds"]]
        return args, {**kwargs, "visual_pos_masks": parts.take(mask, 1), "deepstack_visual_embeds": features}

    @disable_compiler
    def _before_layer(
        self, attentions: Sequence[torch.nn.Module], layer: torch.nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict]:
        """Select this rank's tokens in the arguments of the block `layer`, before its forward.

        Also store a `Row` (the division of the tokens and the position ids) in the attention modules of `layer`, where
        the attention function reads it.

        attentions: the attention modules of `layer`.
        """
        parts = self._active
        if parts is None:
            raise RuntimeError(
                f"sequence_parallel: a {type(layer).__name__} was called outside the model's forward, so it is unknown "
                "which tokens of a sequence it should process on this rank. Call the model instead."
            )
        signature = inspect.signature(layer.forward).parameters.values()
        names = [each.name for each in signature if each.kind in _POSITIONAL]
        if any(isinstance(value, Tensor) for value in args[len(names) :]):
            raise NotImplementedError(
                f"sequence_parallel: the forward of {type(layer).__name__} got {len(args)} positional arguments, but "
                f"names only {len(names)} of them ({', '.join(names)}). The others are in its *args, so it is unknown "
                "which have a dimension of tokens. Name them in the signature of the forward, or wrap the model "
                "without sequence_parallel."
            )
        given = {**dict(zip(names, args)), **kwargs}
        positions = given.get("position_ids")
        for attention in attentions:
            known: Row | None = vars(attention).get(ROW)
            if known is None or known.parts is not parts or known.positions is not positions:
                setattr(attention, ROW, Row(parts, positions))
        own = functools.partial(self._own_tokens, layer, parts)
        args = (*(own(name, value) for name, value in zip(names, args)), *args[len(names) :])
        return args, {name: own(name, value) for name, value in kwargs.items()}

    @staticmethod
    def _own_tokens(layer: torch.nn.Module, parts: Parts, name: str, value: Any) -> Any:
        """Return an argument of a block's forward with only this rank's tokens.

        Masks, caches and values without a dimension of tokens are returned unchanged.

        layer: the block, for messages.
        parts: the division of the tokens of a row (sequence) among the ranks.
        name: the name of the argument. It determines in which dimension tokens are expected.
        value: the argument.
        """
        if value is None or "mask" in name or name in _CACHES:
            return value
        if any(word in name for word in _ROTARY):
            return pytree.tree_map_only(Tensor, lambda each: _narrow(parts, each, -2), value)
        if not isinstance(value, Tensor):
            return value
        if name == "position_ids":
            return _narrow(parts, value, -1)
        if value.dim() > 1 and value.shape[1] == parts.length:
            # Copy this rank's tokens of the hidden states. (Only the first block gets hidden states of all tokens.) If
            # autograd saved a view instead, it would keep all tokens in memory. Other arguments are usually the same
            # tensors for all blocks. So take views of them, which need no additional memory.
            own = parts.take(value, 1)
            return own.clone() if name == "hidden_states" else own
        places = [dim for dim in range(2, value.dim()) if value.shape[dim] == parts.length]
        # Return the value unchanged if no dimension has all tokens, or if dimension 1 has this rank's tokens already.
        if not places or value.shape[1] == len(parts.own):
            return value
        if len(places) > 1:
            raise NotImplementedError(
                f"sequence_parallel: {type(layer).__name__} is called with {name} of shape {tuple(value.shape)}, in "
                f"which the dimension of tokens is unknown: several are as long as the row ({parts.length} tokens). "
                "Use rows of a different length, or wrap the model without sequence_parallel."
            )
        return parts.take(value, places[0])

    @disable_compiler
    def _after_last_layer(self, layer: torch.nn.Module, args: tuple, output: Any) -> Any:
        """Pad the output of the last block, which has this rank's tokens, with zeros to the length of the sequence.

        This hook exists only if the module that calls the blocks reshapes this output to the shape of its own input,
        which has all tokens.
        """
        parts = self._active
        if parts is None:
            return output
        before, after = parts.own.start, parts.length - parts.own.stop
        return _first(output, lambda hidden: torch.nn.functional.pad(hidden, (0, 0, before, after)))

    @disable_compiler
    def _after_trunk(self, trunk: torch.nn.Module, args: tuple, output: Any) -> Any:
        """Keep only this rank's tokens of the hidden states that `trunk`, the module that calls the blocks, returns.

        In some models, `_after_last_layer` has padded the hidden states with zeros in the places of the other ranks'
        tokens. These places are removed here. In a mixture of experts, this hook also gathers the routers' logits of
        all tokens, from which the model computes the auxiliary loss.
        """
        parts = self._active
        if parts is None:
            return output
        output = _first(output, lambda hidden: _narrow(parts, hidden, 1))
        states = output.get("hidden_states") if isinstance(output, dict) else None
        if states:  # the last of them may still be padded with zeros in the places of the other ranks' tokens
            output["hidden_states"] = pytree.tree_map_only(Tensor, lambda each: _narrow(parts, each, 1), states)
        logits = output.get("router_logits") if isinstance(output, dict) else None
        if logits:
            own = len(parts.own)
            whole = [gather_tokens(parts, each.view(-1, own, each.shape[-1])).flatten(0, 1) for each in logits]
            output["router_logits"] = tuple(whole)
        return output

    # -- after the forward ----------------------------------------------------------------------------------------

    @disable_compiler
    def _after_forward(self, model: torch.nn.Module, args: tuple, output: Any) -> Any:
        parts, self._active = self._active, None
        if parts is None or output is None:
            return output
        if not isinstance(output, dict):
            return self._whole(parts, "", output)
        loss = output.get("loss")
        if loss is not None:
            output["loss"] = mean_over_group(parts, loss if self._weight is None else loss * self._weight)
            if self._in_training and output.get("logits") is not None:
                _log_once(
                    "sequence_parallel: to save memory, a training forward with labels returns the loss but no logits. "
                    "To get the logits, call the model without labels."
                )
                output = _without(output, "logits")
        for name, value in [*output.items()]:
            output[name] = self._whole(parts, name, value)
        return output.to_tuple() if self._as_tuple else output  # pyright: ignore[reportAttributeAccessIssue]

    def _whole(self, parts: Parts, name: str, value: Any) -> Any:
        """Return the model's output `name` with all tokens of the rows (sequences), not only those of this rank.

        Outputs that are not divided among the ranks are returned unchanged.

        Collective: every rank of the group that shares the rows must call it.

        value: the output on this rank.
        """
        if name not in _DIVIDED:
            return value

        def whole(tensor: Tensor) -> Tensor:
            own = tuple(tensor.shape[:2]) == (self._rows, len(parts.own))
            return gather_tokens(parts, tensor) if own else tensor

        return pytree.tree_map_only(Tensor, whole, value)


def _first(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to the hidden states in the output of a module, and return the output.

    The hidden states are the output itself, or the first entry of a tuple or ModelOutput.
    """
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, dict):
        name = next(iter(output))
        output[name] = change(output[name])
        return output
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else output


def _without(output: Any, name: str) -> Any:
    """Return a copy of `output`, a ModelOutput, without the entry `name`. (A ModelOutput refuses to delete entries.)"""
    fields = {field.name for field in dataclasses.fields(output)}
    kept = {key: value for key, value in output.items() if key != name}
    made = type(output)(**{key: value for key, value in kept.items() if key in fields})
    for key, value in kept.items():
        made[key] = value
    return made


def _by_name(model: torch.nn.Module, base: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a forward of `model` as {name: value}, including those that are given by position.

    base: the model, without PEFT's wrapper.
    """
    signature = inspect.signature(model.forward)
    # The forward of a PeftModel without a task type has only *args, which it passes on to the model inside.
    if any(each.kind is each.VAR_POSITIONAL for each in signature.parameters.values()):
        signature = inspect.signature(base.forward)
    given = dict(signature.bind_partial(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    return given


def _refuse_arguments(base: Any, given: dict[str, Any]) -> None:
    """Raise NotImplementedError if a forward gets an argument that needs all tokens on each rank, such as a cache.

    base: the model, without PEFT's wrapper.
    given: the arguments of its forward, {name: value}.
    """
    kept = given.get("logits_to_keep", 0)
    refused = {
        **{name: given.get(name) is not None for name in _CACHES},
        "output_attentions=True": given.get("output_attentions", getattr(base.config, "output_attentions", False)),
        "logits_to_keep": isinstance(kept, Tensor) or kept != 0,
        "encoder_hidden_states": given.get("encoder_hidden_states") is not None,
    }
    for name, found in refused.items():
        if found:
            raise NotImplementedError(
                f"sequence_parallel: {type(base).__name__} was called with {name}, which is not supported, because "
                "each rank has only a part of the tokens. Leave it out, also in the model's configuration."
            )


def _refuse_generate(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        "generate() is not supported with sequence_parallel. Save the model (bmt.save), and generate with a model that "
        "is wrapped without sequence_parallel."
    )


def _narrow(parts: Parts, tensor: Tensor, dim: int) -> Tensor:
    """Return a view of this rank's tokens of `tensor`, or `tensor` itself if it does not have all tokens in `dim`."""
    if tensor.dim() < abs(dim) or tensor.shape[dim] != parts.length:
        return tensor
    return parts.take(tensor, dim)
