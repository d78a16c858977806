"""A line fitted to points, as transformers' own Trainer tests have it: two scalar weights, data of one number a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from torch import nn
from transformers import Trainer

from jobs import bmt  # with the settings of jobs: no progress bars, nothing for the garbage collector to look through

ROWS, BATCH = 64, 8


class Points(torch.utils.data.Dataset):
    """x and 2 x + 3 with noise, once for every name of a label."""

    def __init__(self, size: int = ROWS, seed: int = 42, labels: tuple[str, ...] = ("labels",)) -> None:
        generator = np.random.default_rng(seed)
        self.x = generator.normal(size=size).astype(np.float32)
        noise = generator.normal(scale=0.1, size=(len(labels), size)).astype(np.float32)
        self.ys = dict(zip(labels, 2 * self.x + 3 + noise))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, np.float32]:
        return {"input_x": self.x[index], **{name: y[index] for name, y in self.ys.items()}}


class LineConfig(transformers.PretrainedConfig):
    model_type = "line"

    def __init__(self, a: float = 0.0, b: float = 0.0, twice: bool = False, noisy: bool = False, **kwargs) -> None:
        super().__init__(**kwargs)
        self.a, self.b, self.twice, self.noisy = a, b, twice, noisy


def fit(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, labels: torch.Tensor | None, twice: bool) -> tuple:
    y = a * x + b
    outputs = (y, y) if twice else (y,)
    return outputs if labels is None else (nn.functional.mse_loss(y, labels), *outputs)


class Line(transformers.PreTrainedModel):
    config_class = LineConfig
    base_model_prefix = "line"

    def __init__(self, config: LineConfig) -> None:
        super().__init__(config)
        self.a, self.b = (nn.Parameter(torch.tensor(float(value))) for value in (config.a, config.b))
        self.post_init()

    def forward(self, input_x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple:
        if self.config.noisy:
            input_x = input_x + 0.05 * torch.randn(()) + 0.05 * np.random.rand()
        return fit(self.a, self.b, input_x, labels, self.config.twice)


class PlainLine(nn.Module):
    """The same without anything of transformers."""

    def __init__(self, config: LineConfig) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.tensor(float(value))) for value in (config.a, config.b))
        self.config, self.twice = None, config.twice

    def forward(self, input_x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple:
        return fit(self.a, self.b, input_x, labels, self.twice)


def arguments(folder: str, **given: Any) -> transformers.TrainingArguments:
    """Batch sizes are those of one process."""
    batch = dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), BATCH)
    given = {"report_to": [], "use_cpu": True, "disable_tqdm": True, **batch, **given}
    for name in batch:
        given[name] = max(1, given[name] // bmt.world_size())
    return transformers.TrainingArguments(folder, **given)


def make(folder: str, model: Any = Line, rows: int = ROWS, eval_rows: int = ROWS, **given: Any) -> Trainer:
    """A Trainer around a sharded line; `given` are settings of the line, options of Trainer and TrainingArguments."""
    line = {name: given.pop(name) for name in ("a", "b", "twice", "noisy") if name in given}
    names = ("compute_metrics", "preprocess_logits_for_metrics", "data_collator", "callbacks", "optimizers")
    options = {name: given.pop(name) for name in names if name in given}
    labels = tuple(given.get("label_names", ("labels",)))
    return wrapped(
        model(LineConfig(**line)), arguments(folder, **given), train_dataset=Points(rows, labels=labels),
        eval_dataset=Points(eval_rows, labels=labels), **options,
    )  # fmt: skip


def wrapped(model: nn.Module, args: transformers.TrainingArguments, **options: Any) -> Trainer:
    """Stock Trainer around `model`, which is sharded here, and the callback."""
    callbacks = [*options.pop("callbacks", []), bmt.hf.BMTrainCallback()]
    trainer = Trainer(model=bmt.auto_wrap(model), args=args, callbacks=callbacks, **options)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the whole weights, on every rank."""
    return {name: value.detach().clone() for name, value in type(model).state_dict(model).items()}


def ends(trainer: Trainer) -> tuple[float, float]:
    """a and b."""
    weights = whole(trainer.model)
    return weights["a"].item(), weights["b"].item()


def close_to(line: np.ndarray, a: float, b: float, x: np.ndarray) -> bool:
    return np.allclose(line, a * x + b)


def close_enough(prediction: Any) -> dict[str, float]:
    """The share of predictions within a quarter of their labels."""
    values, labels = (part[0] if isinstance(part, tuple) else part for part in prediction)
    return {"accuracy": float(np.mean(np.abs(values - labels) <= 0.25))}


def checkpoints(folder: str) -> list[int]:
    """Steps of the checkpoints in `folder`, once every rank is done."""
    bmt.synchronize()
    steps = sorted(int(path.name.split("-")[1]) for path in Path(folder).glob("checkpoint-*"))
    bmt.synchronize()
    return steps


def logged(trainer: Trainer) -> list[dict[str, Any]]:
    """The log without what is measured in seconds, and without the mean loss, which a resumed run has of its part."""
    seconds = ("_runtime", "_per_second", "_per_device", "memory_gib", "train_loss")
    return [{k: v for k, v in entry.items() if not k.endswith(seconds)} for entry in trainer.state.log_history]


def read_state(checkpoint: str | Path) -> dict[str, Any]:
    return json.loads((Path(checkpoint) / "trainer_state.json").read_text())


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Words w0 to w59, made here: nothing is downloaded."""
    words = {"[PAD]": 0, "[EOS]": 1, **{f"w{number}": number + 2 for number in range(58)}}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[EOS]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, pad_token="[PAD]", eos_token="[EOS]")
