"""A classifier with two labels and its tokenizer: pretrained, or small and new."""

from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from boolq.small_bert import small_bert_config
from common.hub import check_hub, first_line, is_hub_name

LABELS = {0: "False", 1: "True"}


def quiet_transformers(*, terminal: bool) -> None:
    """Turn off transformers' progress bars and log messages (except errors), unless `terminal` is true.

    terminal: whether this process writes to a terminal.
    """
    if not terminal:
        logging.disable_progress_bar()
        logging.set_verbosity_error()


def check_model_name(name: str) -> None:
    """Check that `name` is the folder of a model or may be a name on the Hub, without loading the model.

    Raises FileNotFoundError if it is neither, and ValueError if it may be a Hub name but the Hub does not answer.
    """
    folder = Path(name).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise FileNotFoundError(f"--model {name} has no config.json: give the folder of a saved model")
    if not folder.is_dir() and (folder.exists() or not is_hub_name(name)):
        raise FileNotFoundError(
            f"--model {name}: no such folder; give the folder of a saved model, or a name on the hub such as "
            "bert-base-uncased"
        )
    if not folder.is_dir():
        check_hub(f"--model {name}")


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    tokenizer = from_pretrained(AutoTokenizer, name)
    if tokenizer.pad_token is None:
        raise ValueError(f"the tokenizer of {name} has no padding token: give a --model that has one, such as BERT")
    return tokenizer


def load_model(name: str, seed: int, dropout: float | None) -> PreTrainedModel:
    """Load a model with a classifier for two labels, in float32 on the CPU.

    Args:
        name: a folder, or a name on the Hub.
        seed: the seed of the weights that are not in the files, such as those of a new classifier.
        dropout: replaces all dropout probabilities of the model; None keeps those in its configuration.
    """
    config = from_pretrained(AutoConfig, name)
    adapt(config, dropout)
    torch.manual_seed(seed)
    return from_pretrained(
        AutoModelForSequenceClassification,
        name,
        config=config,
        dtype=torch.float32,
        ignore_mismatched_sizes=True,  # the classifier in the files may have another number of labels
    )


def new_small_bert(vocabulary_size: int, seed: int, dropout: float | None) -> PreTrainedModel:
    config = small_bert_config(vocabulary_size)
    adapt(config, dropout)
    torch.manual_seed(seed)
    return AutoModelForSequenceClassification.from_config(config)


def from_pretrained(auto_class, name: str, **options):
    """Call `auto_class.from_pretrained`. Replace its long error messages by a ValueError of one line.

    Args:
        auto_class: a class of transformers such as AutoTokenizer.
        name: a folder, or a name on the Hub.
        **options: passed to `auto_class.from_pretrained`.
    """
    folder = Path(name).expanduser()
    try:
        return auto_class.from_pretrained(folder if folder.is_dir() else name, **options)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"cannot load --model {name} ({first_line(error)}); check the name and the network, or give the "
            "folder of a saved model"
        ) from error


def adapt(config: PreTrainedConfig, dropout: float | None) -> None:
    """Change a configuration in place: to two labels, and to the given dropout.

    Args:
        config: the configuration of the model.
        dropout: the value of all its dropout probabilities; None does not change them.
    """
    config.id2label = dict(LABELS)
    config.label2id = {label: number for number, label in LABELS.items()}
    config.problem_type = "single_label_classification"
    if dropout is None:
        return
    for name, value in config.to_dict().items():
        if ("dropout" in name or name.endswith(("pdrop", "layerdrop"))) and not isinstance(value, bool | str):
            setattr(config, name, dropout)


def check_max_length(max_length: int, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    positions = getattr(model.config, "max_position_embeddings", None) or tokenizer.model_max_length
    limit = min(positions, tokenizer.model_max_length)
    if max_length > limit:
        raise ValueError(f"--max-length {max_length} is more than the {limit} tokens the model can read: give less")
