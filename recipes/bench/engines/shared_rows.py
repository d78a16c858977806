"""Rows that several ranks share, for engines that leave positions, labels and the loss to their user."""

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutputWithPast

from bench.engines.base import Batch
from bench.models import IGNORED, MASKED, is_classifier

CHUNK = 4096
"""Tokens whose logits exist at a time."""
SCALES = ("final_logit_softcapping", "logits_scaling", "logit_scale", "output_router_logits")
"""Settings of models that change the logits or add another loss."""


def whole_row(batch: Batch) -> Batch:
    """Return what has to be known of the whole row before it is split.

    batch: input_ids and labels, each (rows, tokens). The result has new tensors of this shape: input_ids, position_ids,
    shift_labels (of each token the label of the next), and attention_mask, without which transformers would take
    position_ids that do not increase by one for those of several documents. count: how many labels are not ignored.
    """
    ids = batch["input_ids"]
    labels = F.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:].contiguous()
    return {
        "input_ids": ids.clone(),
        "position_ids": torch.arange(ids.shape[1], device=ids.device).repeat(ids.shape[0], 1),
        "attention_mask": torch.ones_like(ids),
        "shift_labels": labels,
        "count": (labels != IGNORED).sum(),
    }


def compute_loss_in_chunks(model, ranks: int) -> None:
    """Make the causal language model compute its loss without the logits of all tokens, in both passes.

    Its forward then takes a part of `whole_row`. It returns the loss so that its mean over the `ranks` that share a row
    is the mean over the row's labels. Raises ValueError for a model that computes its loss in another way.
    """
    config = model.config
    scaled = [name for name in SCALES if getattr(config, name, None)]
    if config.model_type in MASKED or is_classifier(config) or scaled:
        why = f"its config has {scaled[0]}" if scaled else "it does not predict the next token"
        raise ValueError(
            f"--linear-loss and --sequence-parallel: {type(model).__name__} is not supported, because {why}"
        )

    def sum_of_chunk(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = model.get_output_embeddings()(hidden).float()
        return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")

    def forward(self, shift_labels, count, **inputs):
        hidden = self.base_model(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)
        chunks = zip(hidden.split(CHUNK), shift_labels.flatten().split(CHUNK))
        sums = [checkpoint(sum_of_chunk, *chunk, use_reentrant=False) for chunk in chunks]
        loss: Any = torch.stack(sums).sum() * ranks / count  # transformers annotates a FloatTensor
        return CausalLMOutputWithPast(loss=loss)

    model.forward = types.MethodType(forward, model)
