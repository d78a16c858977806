"""Losses that are means over labels where ranks or Trainers differ; `trainer_usages` compares them with one process."""

import gc
import math
import pickle
import weakref

import numpy
import pytest
import torch
import transformers
from trainer_usages import OwnMean, Rows, bert, collate, ctc, electra, llama, mean_of_outputs, own, segformer

import hf_bmtrain as bmt
import jobs
from cases import full, in_full
from hf_bmtrain.hf.losses.count_use import CountUse
from hf_bmtrain.hf.losses.hooks import counted_labels
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


class Writer(transformers.LlamaPreTrainedModel):
    """A causal model of the user, which shifts its labels. Its name does not say so, but its `loss_type` does."""

    def __init__(self, config):
        super().__init__(config)
        self.model, self.head = transformers.LlamaModel(config), torch.nn.Linear(config.hidden_size, config.vocab_size)
        self.loss_type = "ForCausalLM"
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        logits = self.head(self.model(input_ids, attention_mask)[0])
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def shifted_by_the_model(folder):
    """The logged loss of a step whose last rows are the longest, and the loss of an evaluation."""
    rows, size = sorted(Rows("ids", 8), key=lambda row: len(row["labels"])), 8 // bmt.world_size()
    args = jobs.arguments(
        folder, per_device_train_batch_size=size, per_device_eval_batch_size=size, max_steps=1, optim="sgd",
        train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = transformers.Trainer(
        bmt.auto_wrap(own(Writer)()), args, data_collator=collate, train_dataset=rows, eval_dataset=rows,
        callbacks=[bmt.hf.BMTrainCallback()],
    )  # fmt: skip
    trainer.train()
    return trainer.state.log_history[0]["loss"], trainer.evaluate()["eval_loss"]


def test_own_models_that_shift_labels(world, tmp_path):
    """Their first labels do not count, with which the mean of the rank with the shorter rows would weigh too much."""
    (expected,) = world(1)(shifted_by_the_model, str(tmp_path))
    for found in world(2)(shifted_by_the_model, str(tmp_path)):
        assert found == pytest.approx(expected, rel=1e-6)


def trained_with_function(folder, wrap, given):
    """The log of an epoch of 10 rows, 8 in a step, the evaluation loss, and how many of the made models are alive.

    given: where the Trainer gets the model, "model" or "model_init", and the function, "constructor" or "attribute".
    """
    made, (place, when) = [], given

    def make():
        model = bert("SequenceClassification", num_labels=3)()
        model = bmt.auto_wrap(model) if wrap else model
        made.append(weakref.ref(model))
        return model

    args = jobs.arguments(
        folder, per_device_train_batch_size=8 // bmt.world_size(), max_steps=2, optim="sgd",
        per_device_eval_batch_size=8 // bmt.world_size(),
    )  # fmt: skip
    trainer = transformers.Trainer(
        **{place: make if place == "model_init" else make()}, args=args, data_collator=collate,
        train_dataset=Rows("class", 10), eval_dataset=Rows("class", 10, 1),
        callbacks=[bmt.hf.BMTrainCallback()] if wrap else [],
        compute_loss_func=mean_of_outputs if when == "constructor" else None,
    )  # fmt: skip
    if when == "attribute":
        trainer.compute_loss_func = mean_of_outputs
    before = [trainer.evaluate()["eval_loss"]] if place == "model" else []
    trainer.train()
    gc.collect()
    logged = [number for step in jobs.losses(trainer.state.log_history, "grad_norm") for number in step]
    return [*before, *logged, trainer.evaluate()["eval_loss"]], sum(model() is not None for model in made)


@pytest.mark.parametrize(
    "given", [("model", "attribute"), ("model_init", "constructor"), *in_full(("model_init", "attribute"))]
)
def test_a_loss_function_of_another_moment(world, tmp_path, given):
    """`compute_loss_func` is set after the Trainer is made, or the model is made again when training begins."""
    ((plain, _),) = world(1)(trained_with_function, str(tmp_path), False, given)
    for found, alive in world(2)(trained_with_function, str(tmp_path), True, given):
        assert found == pytest.approx(plain, rel=1e-4)
        assert alive == 1


def without_labels(folder, head, label, wrap):
    """The logged loss, and the weights, of a step of 4 rows whose labels are all -100."""
    model = bert(head, num_labels=1 if head == "SequenceClassification" else 3)()
    rows = [{"input_ids": torch.arange(1, 5) + row, "labels": label} for row in range(4)]
    args = jobs.arguments(folder, per_device_train_batch_size=4 // bmt.world_size(), max_steps=1, optim="sgd")
    trainer = transformers.Trainer(
        model=bmt.auto_wrap(model) if wrap else model, args=args, train_dataset=rows,
        callbacks=[bmt.hf.BMTrainCallback()] if wrap else [],
    )  # fmt: skip
    trainer.train()
    return trainer.state.log_history[0]["loss"], jobs.weights(trainer.model)


@pytest.mark.parametrize(
    ("head", "label", "finite"),
    [
        ("SequenceClassification", torch.tensor(-100.0), True),
        ("TokenClassification", torch.full((4,), -100), False),  # 0 / 0, of which gradients are 0
    ],
)
def test_all_labels_are_minus_one_hundred(world, tmp_path, head, label, finite):
    ((loss, weights),) = world(1)(without_labels, str(tmp_path), head, label, False)
    assert math.isfinite(loss) == finite
    for found, moved in world(2)(without_labels, str(tmp_path), head, label, True):
        assert found == pytest.approx(loss, rel=1e-5, nan_ok=True)
        for name, weight in weights.items():
            torch.testing.assert_close(moved[name], weight, msg=name)


def test_which_labels_count():
    pixels, numbers = torch.tensor([[[0, 255, -100]]]), torch.tensor([0.0, -100.0])
    ids, mask = torch.tensor([[1, 0, -100]]), torch.tensor([[1, 0, 1]])
    for model, given, own_code, counted in [
        (segformer(), {"labels": pixels}, False, [[[True, False, True]]]),
        (segformer(1), {"labels": pixels[..., :2]}, False, [[[True, True]]]),
        (segformer(), {"labels": pixels[0, 0, :2]}, False, [True, True]),  # classes of images
        (llama(), {"labels": numbers}, False, [True, True]),
        (llama(), {"labels": numbers}, True, [True, False]),
        (llama(), {"labels": ids, "attention_mask": mask}, False, [[True, True, False]]),
        (electra(), {"labels": ids, "attention_mask": mask}, False, [[True, False, False]]),
        (electra(), {"labels": ids}, False, [[True, True, False]]),
    ]:
        assert counted_labels(model, given, own_code).tolist() == counted
    assert counted_labels(llama(), {"labels": None}, False) is None


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


def divide_by_new_tensor(total, count):
    return total / torch.tensor(count, dtype=total.dtype)


def divide_by_cast(total, count):
    return total / torch.as_tensor(count, dtype=torch.float64)


def divide_by_its_like(total, count):
    return total / total.new_tensor(count)


def divide_by_filled(total, count):
    return total / torch.full_like(total, count)


def divide_by_stored(total, count):
    divisors = torch.ones(2)
    divisors[0] = count
    return total / divisors[0]


def divide_by_array(total, count):
    return total / float(numpy.asarray(count))


def divide_by_shared(total, count):
    return total / torch.from_dlpack(torch.as_tensor(count))


def divide_by_pickled(total, count):
    return total / pickle.loads(pickle.dumps(torch.as_tensor(count)))


def divide_by_complex(total, count):
    return total / complex(count).real


def told(total, count):
    return total + len(f"{count} {count!r}") * 0


def divide_in_stack(total, count):
    both = torch.stack([total, count])
    return both[0] / both[1]


@pytest.mark.parametrize(
    "function",
    [
        divide, divide_by_copy, divide_by_number, divide_by_item, pass_on, fused, ignore, divide_by_new_tensor,
        divide_by_cast, divide_by_its_like, divide_by_filled, divide_by_stored, divide_by_array, divide_in_stack,
        divide_by_shared, divide_by_pickled, divide_by_complex, told,
        compiled(divide), compiled(divide_by_copy), compiled(pass_on),
        compiled_ignore,
    ],
)  # fmt: skip
@pytest.mark.parametrize("count", [torch.tensor(7), 7])
def test_use_of_the_number_of_labels_is_seen(function, count):
    use, total = CountUse(), torch.tensor(3.0, requires_grad=True)
    for _ in range(2):
        loss = function(total, count=use.observed(count))
        assert use.seen == (function not in (ignore, told, compiled_ignore))
        assert type(loss) is torch.Tensor and loss.requires_grad
        torch.testing.assert_close(loss, function(total, count=torch.as_tensor(count)))
