"""Let Trainer collect the next batch while the GPU still updates the weights."""

from __future__ import annotations

import logging
from typing import Any

from ...engine.runtime.world import current_world

_log = logging.getLogger("hf_bmtrain")
_PACKAGES = ("transformers", "trl")
"""Their data collators make new tensors for each batch."""
_LOADERS = ("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader")


def copy_batches_without_waiting(trainer: Any) -> None:
    """Make the data loaders of a Trainer copy batches to the GPU without waiting for it.

    By default, Accelerate waits for each copy, and so for the optimizer step that was launched before it. Only then
    does it collect the batch after this one, while the GPU has nothing to do. This function sets Accelerate's
    `DataLoaderConfiguration.non_blocking`, as `TrainingArguments(accelerator_config={"non_blocking": True})` does. It
    has an effect on data loaders that are prepared later.

    A copy that has not ended when the next batch is collected is safe only if this does not write to the same pinned
    memory. So nothing is changed if the program has its own data collator or its own methods that make data loaders, or
    if batches are not pinned.

    Args:
        trainer: a Trainer, whose `accelerator` has been created.
    """
    configuration = trainer.accelerator.dataloader_config
    if current_world().device.type == "cpu" or not trainer.args.dataloader_pin_memory or configuration.non_blocking:
        return
    collator = trainer.data_collator
    sources = {"data collator": collator if hasattr(collator, "__qualname__") else type(collator)}
    sources |= {name: getattr(trainer, name) for name in _LOADERS}
    own = [name for name, source in sources.items() if source.__module__.partition(".")[0] not in _PACKAGES]
    if own:
        _log.info(
            "Trainer waits for the GPU when it copies a batch, because this program has its own %s. If it does not "
            'reuse pinned memory, accelerator_config={"non_blocking": True} shortens each step.',
            " and ".join(own),
        )
        return
    configuration.non_blocking = True
    _log.info("Trainer copies batches to the GPU without waiting for it, as with Accelerate's non_blocking=True")
