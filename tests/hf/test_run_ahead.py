"""What Trainer, Accelerate and transformers read from the GPU in a step, and that nothing changes without it."""

import inspect
import math
import traceback
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
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
from hf_bmtrain.hf.run_ahead import batches, masks
from tiny_models import build

LENGTH, STEPS = 8, 6
CACHE = [*inspect.signature(masking_utils.create_causal_mask).parameters][3]
"""The name of a parameter that a release of transformers changed."""


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
        model = bmt.auto_wrap(model)
    callbacks = [*([bmt.hf.BMTrainCallback()] if ours else []), *callbacks]
    return cls(model, arguments, train_dataset=rows(kind), eval_dataset=rows(kind)[:4], callbacks=callbacks)


def losses(folder, ours, attention="sdpa", kind="none", cls=Trainer, options=()):
    options = {"logging_steps": 1, "eval_steps": 4, "eval_strategy": "steps", **dict(options)}
    trainer = make_trainer(folder, llama(attention), ours, kind, cls, **options)
    trainer.train()
    return [entry.get("loss", entry.get("eval_loss")) for entry in trainer.state.log_history[:-1]]


# -- what is read ---------------------------------------------------------------------------------------------------


class Reads(TorchDispatchMode):
    """Counts values that the host reads to make masks, and the questions whether a tensor contains nan."""

    def __init__(self):
        super().__init__()
        self.of_masks = self.of_nan = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            frames = traceback.walk_stack(None)
            self.of_masks += any(frame.f_code.co_filename == masking_utils.__file__ for frame, _ in frames)
        self.of_nan += func is torch.ops.aten.isnan.default
        return func(*args, **(kwargs or {}))


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


# -- masks ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def questions():
    found = masks.MaskQuestions(llama("sdpa"))
    yield found
    found.close()


def sent(mask: torch.Tensor) -> torch.Tensor:
    return masks.data_loader.send_to_device({"attention_mask": mask}, torch.device("cpu"))["attention_mask"]


def causal_mask(mask, attention="sdpa", positions=None):
    config = LlamaConfig(attn_implementation=attention)
    return masking_utils.create_causal_mask(
        config, torch.empty(2, LENGTH, 4), attention_mask=mask, position_ids=positions, **{CACHE: None}
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_masks_of_ones(questions, attention) -> None:
    mask = sent(torch.ones(2, LENGTH, dtype=torch.long))
    with Reads() as counted:
        ours = causal_mask(mask, attention)
    assert counted.of_masks == 0
    plain = causal_mask(torch.ones(2, LENGTH, dtype=torch.long), attention)
    assert ours is plain is None or torch.equal(ours, plain)


@pytest.mark.parametrize("change", ["before", "after"])
def test_masks_with_zeros(questions, change) -> None:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    if change == "before":
        mask[0, -2:] = 0
    mask = sent(mask)
    if change == "after":
        mask[0, -2:] = 0
    found = causal_mask(mask)
    assert found is not None and not found[0, 0, -1, -1] and found[1, 0, -1, -1]


def test_masks_without_versions(questions) -> None:
    with torch.inference_mode():
        mask = sent(torch.ones(2, LENGTH, dtype=torch.long))
        assert causal_mask(mask) is None


def test_positions_of_another_model_are_read(questions) -> None:
    questions._counting.append(LlamaConfig())
    test_packed_positions_are_read(questions)


def test_packed_positions_are_read(questions) -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    found = causal_mask(None, positions=positions)
    assert found is not None and not found[0, 0, -1, 0]


def test_a_forward_that_fails_is_forgotten(questions) -> None:
    model = llama("sdpa")
    followed = masks.MaskQuestions(model)
    with pytest.raises(IndexError):
        model(torch.tensor([[99]]))
    assert followed._counting == []
    followed.close()


class Seen(TrainerCallback):
    def __init__(self):
        self.functions = []

    def on_step_end(self, args, state, control, **kwargs):
        self.functions.append(functions())


def functions():
    return masking_utils._preprocess_mask_arguments, masks.data_loader.send_to_device


def trained_twice(folder):
    before, seen, hooks = functions(), Seen(), []
    trainer = make_trainer(folder, llama("sdpa"), True, callbacks=[seen])
    for _ in range(2):
        trainer.train()
        assert functions() == before and seen.functions[-1] != before
        assert "training_step" not in vars(trainer)
        hooks.append([len(module._forward_pre_hooks) for module in trainer.model.modules()])
    assert hooks[0] == hooks[1]


def test_training_restores_what_it_replaced(world, folder) -> None:
    world(1)(trained_twice, folder)


@pytest.mark.parametrize(
    ("source", "counts"),
    [
        ("position_ids = torch.arange(3)\nposition_ids = position_ids.unsqueeze(0)", True),
        ("position_ids = torch.arange(3)\nposition_ids = text_positions", False),
        ("position_ids = self.create_position_ids_from_input_ids(input_ids)", False),
        ("hidden = self.embed(input_ids)", False),
    ],
)
def test_which_forwards_count_positions(source, counts) -> None:
    body = "def forward(self):\n" + "".join(f"        {line}\n" for line in source.splitlines())
    with mock.patch.object(masks.inspect, "getsource", return_value=body):
        assert masks._counts_positions(len) == counts


# -- batches --------------------------------------------------------------------------------------------------------


class OwnCollator(DataCollatorWithPadding):
    pass


class OwnLoader(Trainer):
    def get_train_dataloader(self):
        return super().get_train_dataloader()


class OwnEvaluation(Trainer):
    def get_eval_dataloader(self, *args, **kwargs):
        return super().get_eval_dataloader(*args, **kwargs)


def own_collator(rows):
    return default_data_collator(rows)


def copies(folder, caplog, kind=Trainer, device="cuda", pinned=True, collator=None, **options):
    """Whether the data loader copies without waiting, and what is logged."""
    arguments = TrainingArguments(folder, use_cpu=True, report_to="none", **options)
    trainer = kind(build("llama"), args=arguments, train_dataset=rows("none"), data_collator=collator)
    trainer.args.dataloader_pin_memory = pinned  # without a GPU, TrainingArguments has set it to False
    with mock.patch.object(batches, "current_world", return_value=SimpleNamespace(device=torch.device(device))):
        caplog.clear()
        with caplog.at_level("INFO", "hf_bmtrain"):
            batches.copy_batches_without_waiting(trainer)
    trainer.args.dataloader_pin_memory = False
    return trainer.get_train_dataloader()._non_blocking, caplog.text


@pytest.mark.parametrize("collator", [None, default_data_collator, DataCollatorWithPadding(mock.Mock())])
def test_collators_of_transformers(folder, caplog, collator) -> None:
    assert copies(folder, caplog, collator=collator) == (True, mock.ANY)
    assert "without waiting" in caplog.text


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"collator": own_collator}, "own data collator."),
        ({"collator": OwnCollator(mock.Mock())}, "own data collator."),
        ({"kind": OwnLoader}, "own get_train_dataloader."),
        ({"kind": OwnEvaluation, "collator": own_collator}, "own data collator and get_eval_dataloader."),
    ],
)
def test_what_could_reuse_memory_is_waited_for(folder, caplog, given, named) -> None:
    waits, told = copies(folder, caplog, **given)
    assert not waits and named in told


def test_nothing_to_change(folder, caplog) -> None:
    assert copies(folder, caplog, device="cpu") == (False, "")
    assert copies(folder, caplog, pinned=False) == (False, "")
    assert copies(folder, caplog, accelerator_config={"non_blocking": True}) == (True, "")
