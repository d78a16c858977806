"""Models of transformers on the meta device, made from a configuration alone."""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig

from ..features.loss.chunked_head import fuse_causal_loss


def read_config(path: str | os.PathLike) -> Any:
    """Return the configuration in a folder or file. Raises ValueError if there is none that transformers knows."""
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise ValueError(
            f"CONFIG {os.fspath(path)!r} is no configuration that transformers {transformers.__version__} knows: "
            f"{str(error).strip().splitlines()[0]} Give a config.json, or the folder that holds one."
        ) from error


def meta_model(config: Any, dtype: torch.dtype, lora: int = 0, fused: bool = False) -> torch.nn.Module:
    """Make the model of `config` on the meta device, in training mode.

    Its class is that of `architectures`, or the one for causal language modelling. lora: the rank of adapters on all
    linear layers, beside which everything is frozen; 0 for none. fused: the loss is computed without whole logits.
    """
    assert isinstance(config, PreTrainedConfig)
    names = config.architectures or []
    cls: Any = getattr(transformers, names[0], None) if names else transformers.AutoModelForCausalLM
    if cls is None:
        raise ValueError(f"CONFIG names the architecture {names[0]!r}, which this transformers does not have.")
    if hasattr(config, "use_cache"):
        config.use_cache = False
    with torch.device("meta"):
        make = getattr(cls, "from_config", None) or cls._from_config
        model = make(config).to(dtype)
        if lora:
            model = _with_adapters(model, lora)
    if fused and not fuse_causal_loss(model):
        raise ValueError("--head fused: this model keeps its whole logits (see the line above). Use --head plain.")
    return model.train()


def _with_adapters(model: Any, rank: int) -> Any:
    import peft

    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


def text_batch(model: Any, config: Any, rows: int, length: int) -> dict[str, torch.Tensor]:
    """Return the shapes of a batch of token sequences with labels, on the meta device.

    Raises ValueError for models of other inputs, and for a length beyond the model's positions.
    """
    text = config.get_text_config()
    most = getattr(text, "max_position_embeddings", None)
    if most is not None and length > most > 0:
        raise ValueError(f"--length {length} is beyond the model's {most} positions: give {most} or less.")
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise ValueError(
            f"CONFIG is of a {type(model).__name__}, whose input is {model.main_input_name}, not tokens: call "
            "bmt.predict_memory(model, batch) with a batch of yours."
        )
    ids = torch.empty(rows, length, dtype=torch.int64, device="meta")
    per_row = any(word in type(model).__name__ for word in ("SequenceClassification", "MultipleChoice"))
    return {"input_ids": ids, "labels": ids[:, 0] if per_row else ids}
