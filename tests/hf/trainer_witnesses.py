"""What rows of the Trainer matrix bring along: callbacks that log what no weight shows, metrics, uneven rows."""

from __future__ import annotations

import math

import numpy as np
import torch
import transformers

from jobs import LENGTH, Rows


class MlpCalls(transformers.TrainerCallback):
    """Logs how often a layer's MLP was begun. Recomputation, which this shows, stops before the MLP's end."""

    def __init__(self) -> None:
        self.calls = 0

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.handle = model.model.layers[1].mlp.register_forward_pre_hook(self.begin)

    def begin(self, module, args):
        self.calls += 1

    def on_log(self, args, state, control, logs=None, **kwargs):
        state.log_history[-1].update(mlp_calls=self.calls)

    def on_train_end(self, args, state, control, **kwargs):
        self.handle.remove()


class MlpBits(MlpCalls):
    """Logs the bits of what a layer's MLP gives."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.handle = model.model.layers[1].mlp.register_forward_hook(self.end)

    def end(self, module, args, output):
        self.bits = torch.finfo(output.dtype).bits

    def on_log(self, args, state, control, logs=None, **kwargs):
        state.log_history[-1].update(mlp_bits=self.bits)


class CompiledGraphs(transformers.TrainerCallback):
    """Logs whether anything was compiled."""

    def on_train_begin(self, args, state, control, **kwargs):
        torch.compiler.reset()  # what another run has compiled
        self.before = self.count()

    def on_log(self, args, state, control, logs=None, **kwargs):
        state.log_history[-1].update(compiled=float(self.count() > self.before))

    @staticmethod
    def count() -> int:
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]


class Impatient(transformers.EarlyStoppingCallback):
    """No loss gets better by so much: training stops at the third evaluation."""

    def __init__(self) -> None:
        super().__init__(early_stopping_patience=2, early_stopping_threshold=100.0)

    def on_train_begin(self, args, state, control, **kwargs):
        """It goes with a run without evaluation too, where it has nothing to stop."""


def accuracy(prediction: transformers.EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def likeliest(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


class ShareByBatch:
    """The share of tokens found, summed up batch by batch."""

    def __init__(self) -> None:
        self.right = self.seen = 0

    def __call__(self, prediction: transformers.EvalPrediction, compute_result: bool = False) -> dict[str, float]:
        self.right += int((prediction.predictions == prediction.label_ids).sum())
        self.seen += math.prod(prediction.label_ids.shape)
        share, total = self.right / self.seen, float(self.seen)
        if compute_result:
            self.right = self.seen = 0
        return {"share": share, "seen": total} if compute_result else {}


def inputs_seen(prediction: transformers.EvalPrediction) -> dict[str, float]:
    seen = {"inputs": prediction.inputs, "losses": prediction.losses}
    return {name: float(np.mean(values)) for name, values in seen.items() if values is not None}


class UnevenRows(Rows):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: values[: 2 + 5 * index % LENGTH] for name, values in super().__getitem__(index).items()}


def pad(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    filled = {"input_ids": 0, "labels": -100}
    return {
        name: torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=filled[name])
        for name, values in columns.items()
    }
