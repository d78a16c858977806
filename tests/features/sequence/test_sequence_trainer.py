"""Stock Trainer with rows that ranks share: each row is seen once, and weights and logs are those of one process."""

import gc
from unittest import mock

import pytest
import torch
import transformers

import hf_bmtrain as bmt
from cases import by_default, full
from log_lines import log_lines
from ranks import on_ranks
from sequence_models import MODELS, TOKENS, VOCABULARY, batch_of

ROWS, RATE = 16, 0.1
MEANS = ("bert", "llama-tokens")
"""Models whose loss is a mean that ignores `num_items_in_batch`. Trainer adds up those of the micro-batches."""


def rows(count=ROWS):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (count, TOKENS), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.5, -100)
    labels[:, 0] = -100  # which older versions of Trainer count, although no token predicts the first one
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels)]


class Seen:
    """The rows of each forward of a model."""

    def __init__(self, model):
        self.batches = []
        model.register_forward_pre_hook(self.note, with_kwargs=True, prepend=True)

    def note(self, model, args, kwargs):
        if torch.is_grad_enabled():
            self.batches.append((kwargs["input_ids"].clone(), kwargs["labels"].clone()))


def train_plainly(name, steps, norm):
    """Train on the (ids, labels) of each micro-batch of each step, and return the losses and the model."""
    model, losses = MODELS[name](), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for batches in steps:
        if name not in MEANS:
            batches = [tuple(torch.cat(tensors) for tensors in zip(*batches))]
        loss = sum(model(input_ids=ids, labels=labels).loss for ids, labels in batches)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("name", by_default(["llama", *MEANS], "llama", "llama-tokens"))
@pytest.mark.parametrize("accumulation", by_default([1, 2], 2))
@on_ranks(4, full=(2,))
def test_trainer(folder, name, accumulation):
    compare_training(folder, name, accumulation)


@full
@on_ranks(2)
def test_router_loss_counts_once(folder):
    """With one group and micro-batch: the auxiliary loss of several is not that of all of their rows."""
    compare_training(folder, "mixtral-router-loss", 1)


def compare_training(folder, name, accumulation):
    model = bmt.auto_wrap(MODELS[name](), sequence_parallel=2)
    if name == "llama":
        assert bmt.hf.fuse_causal_loss(model)
    seen, groups = Seen(model), bmt.world_size() // 2
    args = transformers.TrainingArguments(
        folder, num_train_epochs=1, per_device_train_batch_size=2, gradient_accumulation_steps=accumulation,
        optim="sgd", learning_rate=RATE, lr_scheduler_type="constant", max_grad_norm=0.7, logging_steps=1,
        save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, include_num_input_tokens_seen="all",
    )  # fmt: skip
    trainer = transformers.Trainer(model, args, train_dataset=rows(), callbacks=[bmt.hf.BMTrainCallback()])
    trainer.train()
    assert trainer.state.num_input_tokens_seen == ROWS * TOKENS
    assert trainer.state.total_flos == 6 * ROWS * TOKENS * model.num_parameters(exclude_embeddings=True)
    assert trainer.state.global_step == ROWS // (2 * groups * accumulation)
    everyone = bmt.current_world().gather_objects(seen.batches)
    once = [everyone[rank] for rank in range(0, bmt.world_size(), 2)]
    for rank, batches in enumerate(everyone):
        assert all(map(same, batches, once[rank // 2]))
    ids = torch.cat([batch[0] for batches in once for batch in batches])
    assert sorted(ids.tolist()) == sorted(row["input_ids"].tolist() for row in rows())
    steps = []
    for step in range(trainer.state.global_step):
        taken = zip(*(each[step * accumulation : (step + 1) * accumulation] for each in once))
        steps.append([tuple(torch.cat(tensors) for tensors in zip(*groups)) for groups in taken])
    losses, plain = train_plainly(name, steps, 0.7)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx(losses, rel=2e-4)
    found = model.state_dict()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6)


def same(one, other):
    return torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


@on_ranks(4, full=(2,))
def test_evaluation(folder):
    """The last batch is short: Accelerate fills it with rows of the first one, which must not count."""
    model, plain = bmt.auto_wrap(MODELS["qwen3"](), sequence_parallel=2), MODELS["qwen3"]().eval()
    args = transformers.TrainingArguments(folder, per_device_eval_batch_size=2, report_to="none", use_cpu=True)
    trainer = transformers.Trainer(
        model, args, eval_dataset=rows(5), callbacks=[bmt.hf.BMTrainCallback()],
        compute_metrics=lambda found: {"logits": float(abs(found.predictions).mean()), "rows": len(found.predictions)},
    )  # fmt: skip
    metrics, found = trainer.evaluate(), trainer.predict(rows(5))
    size, losses, logits = bmt.world_size(), [], []  # rows of all groups in a batch: 2 of each
    for batch in (rows(5)[at : at + size] for at in range(0, 5, size)):
        with torch.no_grad():
            output = plain(**{key: torch.stack([row[key] for row in batch]) for key in ("input_ids", "labels")})
        losses.append(len(batch) * output.loss.item())
        logits.append(output.logits)
    assert metrics["eval_rows"] == len(found.predictions) == 5
    assert metrics["eval_loss"] == pytest.approx(sum(losses) / 5, rel=1e-4)
    assert metrics["eval_logits"] == pytest.approx(torch.cat(logits).abs().mean().item(), rel=1e-4)
    torch.testing.assert_close(torch.from_numpy(found.predictions), torch.cat(logits), rtol=1e-3, atol=1e-4)


@on_ranks(2)
def test_arguments(folder):
    model = bmt.auto_wrap(MODELS["llama"](), sequence_parallel=2)
    args = transformers.TrainingArguments(folder, average_tokens_across_devices=False, report_to="none", use_cpu=True)
    with pytest.raises(ValueError, match="average_tokens_across_devices"):
        transformers.Trainer(model, args, train_dataset=rows(), callbacks=[bmt.hf.BMTrainCallback()])


@on_ranks(2)
def test_samples_are_counted_once():
    model = bmt.auto_wrap(MODELS["llama"](), sequence_parallel=2)
    with mock.patch("hf_bmtrain.hf.speed.time.perf_counter", side_effect=[0.0, 1.0]):
        speed = bmt.hf.callback.Speedometer(model)
        model(**batch_of("plain", 0)).loss.backward()
        report = speed.read()
    speed.close()
    assert (report["samples_per_second"], report["tokens_per_second"]) == (2, 2 * TOKENS)


@on_ranks(4)
def test_accelerate_loader():
    """The groups train on different rows, and an evaluation gathers each row once, also of a short last batch."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = bmt.auto_wrap(MODELS["llama"](), sequence_parallel=2)
    loaders = [torch.utils.data.DataLoader(rows(count), batch_size=2) for count in (ROWS, 7)]
    model, loader, short = accelerator.prepare(model, *loaders)
    seen = []
    for batch in loader:
        model(**batch).loss.backward()
        seen += batch["input_ids"].tolist()
    everyone = bmt.current_world().gather_objects(seen)
    assert everyone[0] == everyone[1] and everyone[2] == everyone[3]
    assert sorted(everyone[0] + everyone[2]) == sorted(row["input_ids"].tolist() for row in rows())
    gathered, objects = [], []
    for batch in short:
        gathered += accelerator.gather_for_metrics(batch)["input_ids"].tolist()
        objects += accelerator.gather_for_metrics(batch["input_ids"].tolist())
    assert gathered == objects == [row["input_ids"].tolist() for row in rows(7)]


@on_ranks(2)
def test_later_models_with_rows_of_their_own(folder):
    """Their batches are divided again when no model shares rows any more; as long as one does, the log says so."""
    from accelerate import Accelerator

    args = transformers.TrainingArguments(  # forgets earlier Accelerators, so this comes first
        folder, max_steps=1, per_device_train_batch_size=2, report_to="none", use_cpu=True, save_strategy="no"
    )
    accelerator, sampled = Accelerator(cpu=True), torch.utils.data.DataLoader(torch.arange(8), batch_size=2)

    def batches():
        return [batch.tolist() for batch in accelerator.prepare(sampled)]

    shared, everyone = bmt.auto_wrap(MODELS["llama"](), sequence_parallel=2), [[0, 1], [2, 3], [4, 5], [6, 7]]
    with log_lines() as messages:
        alone = bmt.auto_wrap(MODELS["llama"]())
    assert batches() == everyone
    assert ["all 2 ranks of a group" in message for message in messages] == [True] * (bmt.rank() == 0)
    seen = Seen(alone)  # Trainer knows whose batches these are
    transformers.Trainer(alone, args, train_dataset=rows(4), callbacks=[bmt.hf.BMTrainCallback()]).train()
    ids = bmt.current_world().gather_objects([batch[0].tolist() for batch in seen.batches])
    assert sorted(sum((each[0] for each in ids), [])) == sorted(row["input_ids"].tolist() for row in rows(4))
    share = bmt.auto_wrap(MODELS["llama"](), sequence_parallel=2)
    assert batches() == everyone
    del shared, share
    gc.collect()
    with log_lines() as messages:
        bmt.auto_wrap(MODELS["llama"]())
    assert batches() == everyone[bmt.rank() :: 2] and messages == []
