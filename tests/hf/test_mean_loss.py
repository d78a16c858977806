"""Losses that are means over labels: several ranks train as one process does, without an argument to be set."""

import pytest
import torch
import transformers

import hf_bmtrain as bmt
from cases import in_full

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
KINDS = {
    "classes": transformers.BertForSequenceClassification,
    "masked words": transformers.BertForMaskedLM,
    "tokens": transformers.BertForTokenClassification,
    "divides by itself": transformers.LlamaForCausalLM,
}


def rows(kind):
    """Rows with different numbers of labels, for those that have one for each token."""
    made = []
    for number in range(16):
        ids = (torch.arange(8) * (number + 1)) % 64
        labels = ids % 2
        labels[: number % 5] = -100
        made.append({"input_ids": ids, "labels": number % 2 if kind == "classes" else labels})
    return made


def train(folder, kind, accumulation, size, wrapped):
    torch.manual_seed(0)
    llama = kind == "divides by itself"
    small = {name: value for name, value in SIZES.items() if not llama or "dropout" not in name}
    config = transformers.LlamaConfig(**small) if llama else transformers.BertConfig(**small)
    model = KINDS[kind](config)
    model = bmt.auto_wrap(model) if wrapped else model
    args = transformers.TrainingArguments(
        output_dir=folder, per_device_train_batch_size=4 // size, gradient_accumulation_steps=accumulation, max_steps=2,
        logging_steps=1, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, optim="sgd",
        learning_rate=0.5, train_sampling_strategy="sequential", max_grad_norm=1e9,
    )  # fmt: skip
    callbacks = [bmt.hf.BMTrainCallback()] if wrapped else []
    trainer = transformers.Trainer(model, args=args, train_dataset=rows(kind), callbacks=callbacks)
    trainer.train()
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


def train_sharded(folder, kind, accumulation):
    return train(folder, kind, accumulation, bmt.world_size(), True)


@pytest.mark.parametrize("accumulation", [1, *in_full(2)])
@pytest.mark.parametrize("kind", ["masked words", *in_full("classes", "tokens", "divides by itself")])
def test_as_one_process(world, tmp_path, kind, accumulation):
    expected = train(str(tmp_path / "plain"), kind, accumulation, 1, False)
    for ours in world(2)(train_sharded, str(tmp_path / "ours"), kind, accumulation):
        assert ours == [pytest.approx(each, rel=1e-3) for each in expected]
