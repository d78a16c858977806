"""Answer what transformers asks when it makes attention masks, where the host knows the answer."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate import data_loader
from transformers import PreTrainedModel, masking_utils

_log = logging.getLogger("hf_bmtrain")
_MASK, _POSITIONS = "attention_mask", "position_ids"
_FULL = "_bmt_full"
"""Name of an attribute of a mask without zeros: torch's counter of writes when this was found out."""
_FIRST = [["config", "inputs_embeds", _MASK, cache, _POSITIONS] for cache in ("cache", "past_key_values")]
"""Names of the first parameters of transformers' `_preprocess_mask_arguments`, in the releases that are known."""
_ASSIGNED = re.compile(rf"^ *{_POSITIONS} = (.*)$", re.MULTILINE)
_COUNTED = re.compile(rf"torch\.arange\(|{_POSITIONS}\.unsqueeze\(0\)$")


class MaskQuestions:
    """Keeps transformers from reading masks and position ids on the GPU, for which the host would wait.

    transformers reads them in each forward, for two questions:

    * Does `attention_mask` contain a zero? If not, attention needs no mask. Here this is found out when Accelerate
      copies the batch, which is still in host memory then.
    * Without `attention_mask`, do the position ids belong to several sequences that are packed into a row? Not if the
      forward got none, and so counts them itself from 0.

    Args:
        model: the model, in which both questions are answered until `close`.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._handles: list[Any] = []
        # For each running forward, from the outermost: its model's config, if it counts positions itself.
        self._counting: list[Any] = []
        self._ask: Callable[..., Any] = getattr(masking_utils, "_preprocess_mask_arguments", lambda: None)
        self._send = data_loader.send_to_device
        if [*inspect.signature(self._ask).parameters][:5] not in _FIRST:
            _log.info("each forward waits for the GPU: how this release of transformers makes masks is not known")
            return
        masking_utils._preprocess_mask_arguments = self._answer
        data_loader.send_to_device = self._send_and_note
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                self._follow(module, _counts_positions(type(module).forward))

    def _follow(self, module: torch.nn.Module, counts: bool) -> None:
        def before(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            counted = counts and len(args) < 2 and kwargs.get(_POSITIONS) is None
            self._counting.append(module.config if counted else None)

        def after(module: torch.nn.Module, args: tuple, output: Any) -> None:
            self._counting.pop()

        self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def _answer(self, *args: Any, **kwargs: Any) -> Any:
        """Replace `_preprocess_mask_arguments` of transformers, which every function that makes a mask calls first.

        It returns whether the mask is ready, the mask, the numbers of the packed sequences (None if there are none),
        and sizes. Later, transformers reads a mask that is not None.
        """
        if len(args) < len(_FIRST[0]):
            return self._ask(*args, **kwargs)
        config, embeddings, mask, cache, positions, *others = args
        if self._counting and self._counting[-1] is config:
            positions = None
        ready, result, *sizes = self._ask(config, embeddings, mask, cache, positions, *others, **kwargs)
        if not ready and cache is None and hasattr(mask, _FULL) and getattr(mask, _FULL) == mask._version:
            result = None
        return ready, result, *sizes

    def _send_and_note(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Replace the function with which Accelerate's data loaders copy a batch to the device.

        It returns the copied batch. Its mask, if it has no zeros, has the attribute `_FULL`.
        """
        mask = batch.get(_MASK) if isinstance(batch, Mapping) else None
        full = isinstance(mask, torch.Tensor) and mask.device.type == "cpu" and mask.ndim == 2 and bool(mask.all())
        sent = self._send(batch, *args, **kwargs)
        if full and not sent[_MASK].is_inference():  # those have no version
            setattr(sent[_MASK], _FULL, sent[_MASK]._version)
        return sent

    def close(self) -> None:
        """Restore what was replaced. Called when training ends."""
        for handle in self._handles:
            handle.remove()
        if getattr(masking_utils, "_preprocess_mask_arguments", None) == self._answer:
            masking_utils._preprocess_mask_arguments = self._ask
        if data_loader.send_to_device == self._send_and_note:
            data_loader.send_to_device = self._send


def _counts_positions(forward: Callable[..., Any]) -> bool:
    """Return whether a forward that gets no `position_ids` counts them: 0, 1 and so on in each row.

    forward: the forward of a model of transformers. Its source is searched for what it assigns to `position_ids`.
    """
    try:
        source = inspect.getsource(inspect.unwrap(forward))
    except (OSError, TypeError):  # not written in a file
        return False
    assigned = _ASSIGNED.findall(source)
    return bool(assigned) and all(map(_COUNTED.match, assigned))
