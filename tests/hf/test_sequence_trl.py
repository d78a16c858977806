"""TRL's SFTTrainer, unmodified, with rows that two ranks share: losses, metrics and weights of one plain process."""

import pytest
import torch
from test_trl import make_tokenizer, sentences

import hf_bmtrain as bmt
from cases import rows_in_full
from tiny_models import build

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")

pytestmark = pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning")
OPTIONS = {"padded": {}, "packed": {"packing": True, "max_length": 24}}
METRICS = ("loss", "mean_token_accuracy", "entropy", "grad_norm", "num_tokens")


def train(folder, share, kind):
    """The metrics of each step, the evaluation loss, and the weights. share: ranks a row; 0 for a plain model."""
    model, rows = build("llama"), 4 * max(share, 1) // bmt.world_size()  # 4 in each batch of all groups
    if share:
        model = bmt.auto_wrap(model, sequence_parallel=share)
    args = trl.SFTConfig(
        folder, max_steps=3, per_device_train_batch_size=rows, per_device_eval_batch_size=rows, learning_rate=0.5,
        gradient_accumulation_steps=2, optim="sgd", logging_steps=1, save_strategy="no", report_to="none",
        use_cpu=True, bf16=False, disable_tqdm=True, **OPTIONS[kind],
    )  # fmt: skip
    data = datasets.Dataset.from_dict({"text": sentences(1)})
    callbacks = [bmt.hf.BMTrainCallback()] if share else None
    trainer = trl.SFTTrainer(
        model, args, train_dataset=data, eval_dataset=data.select(range(5)), processing_class=make_tokenizer(),
        callbacks=callbacks,
    )  # fmt: skip
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    logs = [[entry[name] for name in METRICS] for entry in trainer.state.log_history if "loss" in entry]
    return logs, loss, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("kind", "ranks"), [("padded", 2), ("packed", 2), *rows_in_full([("padded", 4)])])
def test_sft(world, folder, kind, ranks):
    logs, loss, weights = world(1)(train, f"{folder}/plain", 0, kind)[0]
    found, evaluated, trained = world(ranks)(train, f"{folder}/shared", 2, kind)[0]
    assert evaluated == pytest.approx(loss, rel=1e-3)
    assert len(logs) == 3
    for mine, expected in zip(found, logs, strict=True):
        assert mine == pytest.approx(expected, rel=1e-3)
    for name, value in weights.items():
        torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-6)
