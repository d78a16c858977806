"""Create models from transformers on the meta device, from a configuration alone."""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils.import_utils import is_peft_available

from ..features.loss.chunked_head import fuse_causal_loss


def read_config(path: str | os.PathLike) -> Any:
    """Read a model's config.json, given the file or its folder. Raises ValueError if transformers cannot read it."""
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise ValueError(
            f"CONFIG {os.fspath(path)!r} is not a configuration that transformers {transformers.__version__} can read "
            f"({str(error).strip().splitlines()[0]}). Pass a config.json, or the folder that contains one."
        ) from error


def meta_model(config: Any, dtype: torch.dtype, lora: int = 0, fused: bool = False) -> torch.nn.Module:
    """Create the model of `config` on the meta device, in training mode, to predict the memory of its training.

    Args:
        config: the configuration. Its first entry in `architectures` is the model's class; without one, the class for
            causal language modeling is used.
        dtype: the dtype of the weights.
        lora: the rank r of LoRA adapters that are added to all linear layers, with all other parameters frozen. 0 adds
            no adapters.
        fused: whether to compute the loss without materializing the full logits (`fuse_causal_loss`).

    Raises:
        ValueError: this version of transformers lacks the class.
        ValueError: PEFT is needed, but not installed.
        ValueError: `fused` does not work with the model.
    """
    assert isinstance(config, PreTrainedConfig)
    names = config.architectures or []
    cls: Any = getattr(transformers, names[0], None) if names else transformers.AutoModelForCausalLM
    if cls is None:
        raise ValueError(
            f"CONFIG names the architecture {names[0]!r}, which transformers {transformers.__version__} does not have. "
            "Install a version that has it."
        )
    if hasattr(config, "use_cache"):
        config.use_cache = False
    with torch.device("meta"):
        make = getattr(cls, "from_config", None) or cls._from_config
        model = make(config).to(dtype)
        if lora:
            model = _with_adapters(model, lora)
    if fused and not fuse_causal_loss(model):
        raise ValueError(
            "--head fused does not work with this model, for the reason in the log line above. Use --head plain."
        )
    return model.train()


def _with_adapters(model: Any, rank: int) -> Any:
    if not is_peft_available():
        raise ValueError("--lora needs PEFT, which is not installed. Run: pip install peft")
    import peft

    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


def text_batch(model: Any, config: Any, rows: int, length: int) -> dict[str, torch.Tensor]:
    """Return a batch of token sequences on the meta device, with which the memory of a training step is predicted.

    Args:
        model: the model that will get the batch.
        config: the configuration of the model.
        rows: the number of sequences.
        length: the number of tokens of each sequence.

    Returns:
        The keyword arguments of the model: {"input_ids": int64 (rows, length), "labels": int64 (rows, length)}. For
        models with one label per sequence, the labels have shape (rows,).

    Raises:
        ValueError: the model does not take tokens, or takes several sequences per row.
        ValueError: `length` exceeds the model's maximum number of positions.
    """
    text = config.get_text_config()
    most = getattr(text, "max_position_embeddings", None)
    if most is not None and length > most > 0:
        raise ValueError(f"--seq-len {length} exceeds the model's maximum of {most} positions: pass {most} or less.")
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise ValueError(
            f"CONFIG describes a {type(model).__name__}, whose input is {model.main_input_name}, not tokens. Call "
            "bmt.predict_memory(model, batch) with your own batch instead."
        )
    if "MultipleChoice" in type(model).__name__:
        raise ValueError(
            f"CONFIG describes a {type(model).__name__}, whose rows have several sequences each, but the batch that "
            "this command makes has one sequence in each row. Call bmt.predict_memory(model, batch) with your own "
            "batch instead."
        )
    ids = torch.empty(rows, length, dtype=torch.int64, device="meta")
    per_row = "SequenceClassification" in type(model).__name__
    return {"input_ids": ids, "labels": ids[:, 0] if per_row else ids}
