"""What Trainer, Accelerate and transformers read from the GPU in a step, and that nothing changes without it."""

import logging
import math
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorWithPadding,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    masking_utils,
)

import hf_bmtrain as bmt
from cases import in_full
from hf_bmtrain.features import masks
from hf_bmtrain.hf.run_ahead import RunAhead
from hf_bmtrain.hf.run_ahead.batches import BatchCopies
from host_reads import Reads
from log_lines import log_lines

LENGTH, STEPS = 8, 6


def llama(attention: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, attn_implementation=attention,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def rows(kind: str) -> list[dict]:
    """32 rows: without a mask, with a mask of ones, padded, or packed (two sequences in each)."""
    tokens = torch.randint(1, 61, (32, LENGTH), generator=torch.Generator().manual_seed(3))
    every = []
    for number, row in enumerate(tokens):
        given = {"input_ids": row, "labels": row}
        if kind == "ones":
            given["attention_mask"] = torch.ones(LENGTH, dtype=torch.long)
        elif kind == "padded":
            given["attention_mask"] = (torch.arange(LENGTH) < LENGTH - number % 3).long()
        elif kind == "packed":
            given["position_ids"] = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4])
        every.append(given)
    return every


class Infinite(Trainer):
    """Trainer whose loss is inf or nan in some steps, while its gradients are not."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        bad = {1: math.nan, 2: math.inf, 4: -math.inf}.get(self.state.global_step)
        return loss if bad is None or not self.model.training else loss + bad


def make_trainer(folder, model, ours, kind="none", cls=Trainer, callbacks=(), **options):
    options = {"max_steps": STEPS, "logging_steps": 100, "learning_rate": 0.1, "optim": "sgd", **options}
    arguments = TrainingArguments(
        folder, use_cpu=True, report_to="none", save_strategy="no", per_device_train_batch_size=2,
        disable_tqdm=True, max_grad_norm=0.0, **options,
    )  # fmt: skip
    if ours:
        wrapped = any(isinstance(module, bmt.CheckpointBlock) for module in model.modules())
        with mock.patch.object(masks, "_reads_wait", return_value=True):  # as on a GPU
            model = model if wrapped else bmt.auto_wrap(model)
    callbacks = [*([bmt.hf.BMTrainCallback()] if ours else []), *callbacks]
    return cls(model, arguments, train_dataset=rows(kind), eval_dataset=rows(kind)[:4], callbacks=callbacks)


def losses(folder, ours, attention="sdpa", kind="none", cls=Trainer, options=()):
    options = {"logging_steps": 1, "eval_steps": 4, "eval_strategy": "steps", **dict(options)}
    trainer = make_trainer(folder, llama(attention), ours, kind, cls, **options)
    trainer.train()
    return [entry.get("loss", entry.get("eval_loss")) for entry in trainer.state.log_history[:-1]]


# -- what is read ---------------------------------------------------------------------------------------------------


class Watch(TrainerCallback):
    """Counts reads from the fourth step to the fifth."""

    def __init__(self):
        self.reads = Reads()

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3:
            self.reads.__enter__()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            self.reads.__exit__(None, None, None)


def reads(folder, ours, kind):
    watch = Watch()
    trainer = make_trainer(folder, llama("sdpa"), ours, kind, callbacks=[watch])
    # Here Trainer's device is cpu:0, which is not the cpu of the batches, so it would copy them once more.
    trainer._prepare_input = lambda batch: batch
    trainer.train()
    return watch.reads.of_masks, watch.reads.of_nan


@pytest.mark.parametrize("kind", ["none", "ones"])
def test_a_step_reads_neither_losses_nor_masks(world, folder, kind) -> None:
    assert world(1)(reads, folder, False, kind) == [(2, 2)]
    assert world(1)(reads, folder, True, kind) == [(0, 0)]


# -- the same results -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", "ones", "padded", "packed"])
@pytest.mark.parametrize("attention", ["sdpa", *in_full("eager")])
def test_equal_losses(world, folder, kind, attention) -> None:
    ours, plain = (world(1)(losses, folder, beside, attention, kind) for beside in (True, False))
    assert ours == plain


@pytest.mark.parametrize(
    ("options", "filtered"),
    [
        ({"logging_steps": 1}, True),
        ({"logging_steps": STEPS}, True),
        ({"gradient_accumulation_steps": 2, "logging_steps": 3}, True),
        ({"logging_steps": 1, "logging_nan_inf_filter": False}, False),
    ],
)
def test_losses_of_inf_and_nan(world, folder, options, filtered) -> None:
    def train(ours):
        return torch.tensor(*world(1)(losses, folder, ours, "sdpa", "none", Infinite, options))

    ours, plain = train(True), train(False)
    torch.testing.assert_close(ours, plain, rtol=0, atol=0, equal_nan=True)
    assert bool(ours.isfinite().all()) == filtered


class OwnLoop(Trainer):
    def _run_epoch(self, *args, **kwargs):
        return super()._run_epoch(*args, **kwargs)


class OwnLoader(Trainer):
    def get_train_dataloader(self):
        return super().get_train_dataloader()


class OwnLoss(Trainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


def own_collator(rows):
    return default_data_collator(rows)


class OwnCollator(DataCollatorWithPadding):
    pass


def removed(folder, cls, collator=None):
    """Whether losses, batches and masks are not waited for, and what is logged."""
    trainer = make_trainer(folder, llama("sdpa"), False, "ones", cls)
    trainer.data_collator = trainer.data_collator if collator is None else collator
    loader = trainer.get_train_dataloader()
    ahead = RunAhead(trainer, loader)
    found = "training_step" in vars(trainer), loader._non_blocking, type(loader.base_dataloader) is not DataLoader
    ahead.close()
    assert "training_step" not in vars(trainer) and not loader._non_blocking
    assert type(loader.base_dataloader) is DataLoader
    return found


@pytest.mark.parametrize(
    ("cls", "collator", "expected"),
    [
        (Trainer, None, (True, True, True)),
        (Trainer, default_data_collator, (True, True, True)),
        (Trainer, DataCollatorWithPadding(mock.Mock()), (True, True, True)),
        (Trainer, own_collator, (True, False, False)),
        (Trainer, OwnCollator(mock.Mock()), (True, False, False)),
        (OwnLoader, None, (True, False, False)),
        (OwnLoss, None, (True, True, False)),
        (OwnLoop, None, (False, True, True)),
    ],
)
def test_methods_of_the_program_keep_waits(folder, caplog, cls, collator, expected) -> None:
    with caplog.at_level("INFO", "hf_bmtrain"):
        assert removed(folder, cls, collator) == expected
    methods = ("_run_epoch", "get_train_dataloader", "data_collator", "compute_loss")
    waits = expected != (True, True, True)
    assert sum(name in caplog.text for name in methods) == waits
    assert "does not wait" in caplog.text and ("except for" in caplog.text) == waits


def dispatched(folder):
    """Batches that one process reads for all are copied as before."""
    options = {"accelerator_config": {"dispatch_batches": True, "split_batches": True}}
    trainer = make_trainer(folder, llama("sdpa"), True, "ones", **options)
    assert not BatchCopies.supports(trainer.get_train_dataloader())
    with log_lines(logging.INFO) as lines:
        trainer.train()
    assert any("except for the copy of each batch" in line for line in lines)


def test_dispatched_batches(world, folder) -> None:
    world(1)(dispatched, folder)


# -- the end of a training ------------------------------------------------------------------------------------------


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        raise InterruptedError


def trained_again(folder):
    before = masking_utils._preprocess_mask_arguments
    with mock.patch.object(masks, "_reads_wait", return_value=True):
        model = bmt.auto_wrap(llama("sdpa"))

    def hooks():
        return [len(module._forward_pre_hooks) for module in model.modules()]

    with pytest.raises(InterruptedError):
        make_trainer(folder, model, True, "ones", callbacks=[Stop()]).train()
    failed, watch = hooks(), Watch()
    trainer = make_trainer(folder, model, True, "ones", callbacks=[watch])
    trainer._prepare_input = lambda batch: batch
    for _ in range(2):
        trainer.train()
        assert "training_step" not in vars(trainer) and hooks() == failed
    assert masking_utils._preprocess_mask_arguments is before
    return watch.reads.of_masks, watch.reads.of_nan


def test_trainings_after_one_that_failed(world, folder) -> None:
    assert world(1)(trained_again, folder) == [(0, 0)]
