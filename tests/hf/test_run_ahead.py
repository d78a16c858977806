"""What Trainer, Accelerate and transformers read from the GPU in a step, and that nothing changes without it."""

import functools
import inspect
import logging
import math
import traceback
from unittest import mock

import pytest
import torch
import transformers
from accelerate.data_loader import DataLoaderShard
from torch.utils._python_dispatch import TorchDispatchMode
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
from hf_bmtrain.hf.run_ahead import RunAhead, masks
from hf_bmtrain.hf.run_ahead.batches import BatchCopies
from log_lines import log_lines

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
        wrapped = any(isinstance(module, bmt.CheckpointBlock) for module in model.modules())
        model = model if wrapped else bmt.auto_wrap(model)
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
    ahead = RunAhead(trainer, trainer.model, loader)
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


# -- masks ----------------------------------------------------------------------------------------------------------


def causal_mask(mask, attention="sdpa", positions=None):
    config = CONFIGS[attention]
    return masking_utils.create_causal_mask(
        config, torch.empty(2, LENGTH, 4), attention_mask=mask, position_ids=positions, **{CACHE: None}
    )


CONFIGS = {attention: LlamaConfig(attn_implementation=attention) for attention in ("sdpa", "eager")}


@pytest.fixture
def during_forward():
    """What a mask is made in: the forward of a model that counts positions."""
    model = llama("sdpa").model
    hook = masks._Forward(model, masking_utils._preprocess_mask_arguments)
    hook(model, (), {})
    yield
    hook.end(model, (), None)


def noted(mask: torch.Tensor) -> torch.Tensor:
    """The mask as the forward gets it."""
    row = {"attention_mask": mask}
    loader = DataLoaderShard([row], batch_size=None, device=torch.device("cpu"))
    BatchCopies(loader, note_masks=True)
    (batch,) = loader
    assert type(batch["attention_mask"]) is torch.Tensor
    return batch["attention_mask"]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_masks_of_ones(during_forward, attention) -> None:
    mask = noted(torch.ones(2, LENGTH, dtype=torch.long))
    with Reads() as counted:
        ours = causal_mask(mask, attention)
    assert counted.of_masks == 0
    plain = causal_mask(torch.ones(2, LENGTH, dtype=torch.long), attention)
    assert ours is plain is None or torch.equal(ours, plain)


@pytest.mark.parametrize("change", ["before", "after"])
def test_masks_with_zeros(during_forward, change) -> None:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    if change == "before":
        mask[0, -2:] = 0
    mask = noted(mask)
    if change == "after":
        mask[0, -2:] = 0
    found = causal_mask(mask)
    assert found is not None and not found[0, 0, -1, -1] and found[1, 0, -1, -1]


def test_masks_without_versions(during_forward) -> None:
    with torch.inference_mode():
        assert causal_mask(noted(torch.ones(2, LENGTH, dtype=torch.long))) is None


def test_masks_of_a_program(during_forward) -> None:
    """A function of the program may need a tensor."""
    given = []

    def own(*args, attention_mask=None, **kwargs):
        given.append(attention_mask)

    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register("own", own)
    transformers.AttentionInterface.register("own", own)
    with mock.patch.dict(CONFIGS, own=LlamaConfig(attn_implementation="own")):
        causal_mask(noted(torch.ones(2, LENGTH, dtype=torch.long)), "own")
    assert given[0] is not None and given[0].all()


def test_masks_in_compiled_code(during_forward) -> None:
    mask = noted(torch.ones(2, LENGTH, dtype=torch.long))
    compiled = torch.compile(causal_mask, backend="eager", fullgraph=True)
    assert compiled(mask, "eager").shape == (2, 1, LENGTH, LENGTH)


PACKED = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])


def test_packed_positions_of_another_model_are_read(during_forward) -> None:
    found = causal_mask(None, positions=PACKED)
    assert found is not None and not found[0, 0, -1, 0]


def by_hook(model):
    model.model.register_forward_pre_hook(
        lambda *given: (given[1], given[2] | {"position_ids": PACKED}), with_kwargs=True
    )


def by_attribute(model):
    forward = model.model.forward
    model.model.forward = functools.wraps(forward)(lambda **given: forward(**given | {"position_ids": PACKED}))


def by_class(model):
    forward = type(model.model).forward

    @functools.wraps(forward)
    def packed(self, **given):
        return forward(self, **given | {"position_ids": PACKED})

    model.model.__class__ = type("Packed", (type(model.model),), {"forward": packed})


@pytest.mark.parametrize("pack", [by_hook, by_attribute, by_class])
def test_packed_positions_that_a_program_adds_are_read(pack) -> None:
    model, tokens = llama("sdpa"), torch.arange(2 * LENGTH).reshape(2, LENGTH)
    pack(model)
    plain = model(tokens, use_cache=False).logits
    shortcuts = masks.MaskShortcuts(model)
    assert torch.equal(model(tokens, use_cache=False).logits, plain)
    shortcuts.close()


@pytest.mark.parametrize(
    ("body", "counts"),
    [
        ("position_ids = torch.arange(3)[None, :]", True),
        ("position_ids = torch.arange(3, device=x.device) + seen\nposition_ids = position_ids.unsqueeze(0)", True),
        ("position_ids = torch.arange(3) % 2", False),
        ("position_ids = torch.arange(3)\nposition_ids += x", False),
        ("position_ids = torch.arange(3)\nposition_ids, x = x", False),
        ("position_ids = torch.arange(3)\nposition_ids = text_positions", False),
        ("position_ids = self.create_position_ids_from_input_ids(input_ids)", False),
        ("hidden = self.embed(input_ids)", False),
    ],
)
def test_which_forwards_count_positions(body, counts) -> None:
    source = "    def forward(self):\n" + "".join(f"        {line}\n" for line in body.splitlines())
    with mock.patch.object(masks.inspect, "getsource", return_value=source):
        assert masks.counts_positions(masking_utils.create_causal_mask) == counts


# -- the end of a training ------------------------------------------------------------------------------------------


def test_a_forward_that_fails_restores_functions() -> None:
    model, before = llama("sdpa"), masking_utils._preprocess_mask_arguments
    shortcuts = masks.MaskShortcuts(model)
    with pytest.raises(IndexError):
        model(torch.tensor([[99]]))
    assert masking_utils._preprocess_mask_arguments is before
    shortcuts.close()


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        raise InterruptedError


def trained_again(folder):
    before = masking_utils._preprocess_mask_arguments
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
