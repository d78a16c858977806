"""Losses that are means over labels where ranks or Trainers differ; `trainer_usages` compares them with one process."""

import pytest
import torch
import transformers
from trainer_usages import OwnMean, Rows, bert, collate, ctc, llama, mean_of_outputs, own

import hf_bmtrain as bmt
import jobs
from cases import full
from hf_bmtrain.hf.losses.count_use import CountUse
from log_lines import log_lines
from tiny_models import build


def train_with_dropped_layers(folder):
    model = bmt.auto_wrap(ctc(layerdrop=0.5))
    args = jobs.arguments(folder, per_device_train_batch_size=2, max_steps=8, optim="sgd", seed=1 + bmt.rank())
    trainer = transformers.Trainer(
        model, args=args, data_collator=collate, train_dataset=Rows("sound", 16), callbacks=[bmt.hf.BMTrainCallback()]
    )
    trainer.add_callback(_OwnSeed())
    trainer.train()
    return trainer.state.global_step


class _OwnSeed(transformers.TrainerCallback):
    """Gives each rank random numbers of its own, as ranks have after different amounts of dropout."""

    def on_step_begin(self, args, state, control, **kwargs):
        torch.manual_seed(100 * bmt.rank() + state.global_step)


@full
def test_ranks_that_drop_different_layers(world, tmp_path):
    """The rank that drops its last layer must not wait for the others' labels before they have computed theirs."""
    assert world(2)(train_with_dropped_layers, str(tmp_path)) == [8, 8]


def train_after_another_trainer(folder):
    """The logged loss of a model with adapters, after a Trainer of the model without them."""
    import peft

    model, data = bmt.auto_wrap(build("llama")), jobs.Rows()
    args = jobs.arguments(
        folder, per_device_train_batch_size=2, max_steps=1, optim="sgd", learning_rate=1e-4,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    first = transformers.Trainer(model, args=args, eval_dataset=data, callbacks=[bmt.hf.BMTrainCallback()])
    first.evaluate()
    adapted = bmt.auto_wrap(peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])))
    second = transformers.Trainer(adapted, args=args, train_dataset=data, callbacks=[bmt.hf.BMTrainCallback()])
    second.train()
    taken = [data[index] for index in range(2 * bmt.world_size())]
    with torch.no_grad():
        joined = {key: torch.stack([row[key] for row in taken]) for key in taken[0]}
        truth = adapted(**joined).loss.item()  # adapters begin as zeros, and one small step changes little
    return second.state.log_history[0]["loss"], truth


@full
def test_hooks_of_another_trainer_do_not_act(world, tmp_path):
    pytest.importorskip("peft")
    for logged, truth in world(2)(train_after_another_trainer, str(tmp_path)):
        assert logged == pytest.approx(truth, rel=1e-2)


def accumulated(folder, make, labels, batch, averaged, function, wrap):
    """The logged loss and gradient norm of one step of 8 rows in micro-batches, and what is said of their sum."""
    model = make()
    args = jobs.arguments(
        folder, per_device_train_batch_size=batch, gradient_accumulation_steps=8 // batch // bmt.world_size(),
        max_steps=1, optim="sgd",
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=bmt.auto_wrap(model) if wrap else model, args=args, data_collator=collate, train_dataset=Rows(labels, 8),
        callbacks=[bmt.hf.BMTrainCallback()] if wrap else [], compute_loss_func=function,
    )  # fmt: skip
    if averaged:
        trainer.model_accepts_loss_kwargs = False
    with log_lines() as lines:
        trainer.train()
    said = [line for line in lines if "adds up the losses" in line]
    return trainer.state.log_history[0]["loss"], trainer.state.log_history[0]["grad_norm"], said


def accumulations(folder, wrap):
    """`accumulated` for each case; the case "one batch" accumulates nothing."""
    classes = bert("SequenceClassification", num_labels=3)
    cases = {
        "one batch": (classes, "class", 8 // bmt.world_size(), False, None),
        "summed": (classes, "class", 2, False, None), "averaged": (classes, "class", 2, True, None),
        "causal": (llama, "ids", 2, False, None), "own": (own(OwnMean), "class", 2, False, None),
        "function": (classes, "class", 2, False, mean_of_outputs),
    }  # fmt: skip
    return {name: accumulated(folder, *case, wrap) for name, case in cases.items()}


def test_sums_of_micro_batches_are_told(world, tmp_path):
    """Trainer adds up means, in one process too; the line says so, and how to average them."""
    (plain,), (one,) = (world(1)(accumulations, str(tmp_path), wrap) for wrap in (False, True))
    for name, (loss, norm, said) in plain.items():
        assert one[name][:2] == pytest.approx((loss, norm), rel=1e-5) and not said, name
    two, other = world(2)(accumulations, str(tmp_path), True)
    loss, norm, _ = plain["one batch"]
    for found, times in (one, 4), (two, 2):
        assert found["one batch"][:2] == pytest.approx((loss, norm), rel=1e-5)
        assert found["averaged"][:2] == pytest.approx((loss, norm), rel=1e-5)
        assert found["summed"][:2] == pytest.approx((times * loss, times * norm), rel=1e-5)
        assert [len(said) for _, _, said in found.values()] == [0, 1, 0, 0, 1, 1]
        for name in "summed", "own", "function":
            assert f"of the {times} micro-batches" in found[name][2][0]
        for name in "own", "function":  # four micro-batches in one process
            assert found[name][:2] == pytest.approx([number * times / 4 for number in plain[name][:2]], rel=1e-5)
    assert not other["summed"][2]


def divide(total, count):
    return total / count


def divide_by_copy(total, count):
    return total / (count.to(total.device) if torch.is_tensor(count) else count)


def divide_by_number(total, count):
    return total / max(int(count), 1)


def divide_by_item(total, count):
    return total / count.item()


def pass_on(total, **given):
    return divide_by_copy(total, given["count"])


def fused(total, count):
    logits = torch.stack([total, -total])[None].requires_grad_()
    return bmt.loss.FusedCrossEntropy()(logits, torch.tensor([1]), num_items_in_batch=count)


def ignore(total, count):
    return total * (count is not None)


def compiled(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True)


compiled_ignore = compiled(ignore)


@pytest.mark.parametrize(
    "function",
    [
        divide, divide_by_copy, divide_by_number, divide_by_item, pass_on, fused, ignore, compiled(divide),
        compiled(divide_by_copy), compiled(pass_on), compiled_ignore,
    ],
)  # fmt: skip
@pytest.mark.parametrize("count", [torch.tensor(7), 7])
def test_use_of_the_number_of_labels_is_seen(function, count):
    use, total = CountUse(), torch.tensor(3.0, requires_grad=True)
    for _ in range(2):
        loss = function(total, count=use.observed(count))
        assert use.seen == (function not in (ignore, compiled_ignore))
        assert type(loss) is torch.Tensor and loss.requires_grad
        torch.testing.assert_close(loss, function(total, count=torch.as_tensor(count)))
