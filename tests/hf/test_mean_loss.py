"""Losses that are means over labels: several ranks train as one process does, without an argument to be set."""

import importlib.util

import pytest
import torch
import transformers

import hf_bmtrain as bmt
from cases import by_default, in_full

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


class CallsSuper(transformers.BertForSequenceClassification):
    def forward(self, input_ids, labels=None, **kwargs):
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


class Bare(torch.nn.Module):
    """Not of transformers; its loss is a function of torch's."""

    def __init__(self, config):
        super().__init__()
        self.embedding = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        layers = [torch.nn.Linear(config.hidden_size, config.hidden_size) for _ in range(2)]
        self.layers = torch.nn.ModuleList(layers)
        self.head = torch.nn.Linear(config.hidden_size, 2)

    def forward(self, input_ids, labels=None, **kwargs):
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        logits = self.head(hidden.mean(1))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


KINDS = {
    "classes": transformers.BertForSequenceClassification,
    "masked words": transformers.BertForMaskedLM,
    "tokens": transformers.BertForTokenClassification,
    "divides by itself": transformers.LlamaForCausalLM,
    "loss is an attribute": transformers.DistilBertForMaskedLM,
    "calls super": CallsSuper,
    "bare": Bare,
    "passes no number": transformers.LlamaForSequenceClassification,
    "numbers": transformers.ViTForImageClassification,
    "rows": transformers.Wav2Vec2ForCTC,
}
IMAGES = {"image_size": 8, "patch_size": 4, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SOUND = {
    "vocab_size": 12, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40,
    "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "activation_dropout": 0.0, "feat_proj_dropout": 0.0, "layerdrop": 0.0, "mask_time_prob": 0.0, "final_dropout": 0.0,
    "ctc_loss_reduction": "mean", "ctc_zero_infinity": True,
}  # fmt: skip


def rows(kind):
    """Rows with different numbers of labels, for those that have one for each token."""
    made = []
    for number in range(16):
        generator = torch.Generator().manual_seed(number)
        if kind == "numbers":
            image = torch.randn(3, 8, 8, generator=generator)
            made.append({"pixel_values": image, "labels": torch.tensor(number / 10)})
            continue
        if kind == "rows":
            labels = torch.randint(1, 12, (4,), generator=generator)
            labels[number % 3 + 1 :] = -100
            made.append({"input_values": torch.randn(400, generator=generator), "labels": labels})
            continue
        ids = (torch.arange(8) * (number + 1)) % 64
        labels = ids % 2
        labels[: number % 5] = -100
        one = kind in ("classes", "calls super", "bare", "passes no number")
        made.append({"input_ids": ids, "labels": number % 2 if one else labels})
    return made


def train_with_dropped_layers(folder):
    torch.manual_seed(0)
    model = bmt.auto_wrap(transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**SOUND | {"layerdrop": 0.5})))
    args = transformers.TrainingArguments(
        output_dir=folder, per_device_train_batch_size=2, max_steps=8, use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True, optim="sgd", seed=1 + bmt.rank(), data_seed=0,
    )  # fmt: skip
    trainer = transformers.Trainer(model, args=args, train_dataset=rows("rows"), callbacks=[bmt.hf.BMTrainCallback()])
    trainer.add_callback(_OwnSeed())
    trainer.train()
    return trainer.state.global_step


class _OwnSeed(transformers.TrainerCallback):
    """Gives each rank random numbers of its own, as ranks have after different amounts of dropout."""

    def on_step_begin(self, args, state, control, **kwargs):
        torch.manual_seed(100 * bmt.rank() + state.global_step)


def test_ranks_that_drop_different_layers(world, tmp_path):
    """The rank that drops its last layer must not wait for the others' labels before they have computed theirs."""
    assert world(2)(train_with_dropped_layers, str(tmp_path)) == [8, 8]


def train_after_another_trainer(folder):
    """The logged loss of a model with adapters, after a Trainer of the model without them."""
    peft = importlib.import_module("peft")
    torch.manual_seed(0)
    small = {name: value for name, value in SIZES.items() if "dropout" not in name}
    model = bmt.auto_wrap(transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)))
    args = transformers.TrainingArguments(
        output_dir=folder, per_device_train_batch_size=2, max_steps=1, logging_steps=1, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, optim="sgd", train_sampling_strategy="sequential",
    )  # fmt: skip
    data = rows("divides by itself")
    first = transformers.Trainer(model, args=args, eval_dataset=data, callbacks=[bmt.hf.BMTrainCallback()])
    first.evaluate()
    adapted = bmt.auto_wrap(peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])))
    second = transformers.Trainer(adapted, args=args, train_dataset=data, callbacks=[bmt.hf.BMTrainCallback()])
    second.train()
    taken = data[: 2 * bmt.world_size()]
    with torch.no_grad():
        joined = {key: torch.stack([row[key] for row in taken]) for key in taken[0]}
        truth = adapted(**joined).loss.item()  # adapters begin as zeros, and one small step changes little
    return second.state.log_history[0]["loss"], truth


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_hooks_of_another_trainer_do_not_act(world, tmp_path):
    for logged, truth in world(2)(train_after_another_trainer, str(tmp_path)):
        assert logged == pytest.approx(truth, rel=1e-2)


def train(folder, kind, accumulation, size, wrapped):
    torch.manual_seed(0)
    llama = kind == "divides by itself"
    small = {name: value for name, value in SIZES.items() if not llama or "dropout" not in name}
    config = transformers.LlamaConfig(**small) if llama else transformers.BertConfig(**small)
    if kind == "passes no number":
        config = transformers.LlamaConfig(**{n: v for n, v in SIZES.items() if "dropout" not in n}, pad_token_id=63)
    if kind == "numbers":
        config = transformers.ViTConfig(**IMAGES, num_labels=1)
    if kind == "rows":
        config = transformers.Wav2Vec2Config(**SOUND)
    if kind == "loss is an attribute":
        config = transformers.DistilBertConfig(vocab_size=64, dim=32, n_layers=2, n_heads=4, hidden_dim=64, dropout=0.0)
        config.attention_dropout = 0.0
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
@pytest.mark.parametrize("kind", by_default(KINDS, "masked words"))
def test_as_one_process(world, tmp_path, kind, accumulation):
    expected = train(str(tmp_path / "plain"), kind, accumulation, 1, False)
    for ours in world(2)(train_sharded, str(tmp_path / "ours"), kind, accumulation):
        assert ours == [pytest.approx(each, rel=1e-3) for each in expected]
