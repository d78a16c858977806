"""The routers' auxiliary loss under Trainer: its coefficient times the mean over micro-batches and ranks."""

import copy
import gc
import logging

import pytest
import torch
import transformers
from trainer_usages import bert, mean_over_labels

import hf_bmtrain as bmt
import jobs
from cases import full, in_full, rows_in_full, slow
from log_lines import log_lines
from zoo_families import FAMILIES

COEFFICIENT = 0.5  # so large that a wrong factor shows
ROWS = 12
LEARNING_RATE = 0.1


def build(name):
    """A model of the family whose forward adds the auxiliary loss, with the coefficient of this file."""
    if name == "peft":
        import peft

        adapters = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        torch.manual_seed(1)
        return peft.get_peft_model(build("mixtral"), adapters)
    model = FAMILIES[name].build()
    text = model.config.get_text_config()
    for owner in (model, model.config, text):
        for field in ("router_aux_loss_coef", "aux_loss_coef", "z_loss_coefficient"):
            if hasattr(owner, field):
                setattr(owner, field, COEFFICIENT)
    text.output_router_logits = True
    return model


def mixtral():
    return build("mixtral")


def plain_steps(name, rows, accumulation, total=ROWS):
    """Losses and weights of plain torch: the cross entropy of all tokens, the mean of the auxiliary losses."""
    model = build(name)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    batches = list(torch.utils.data.DataLoader(jobs.Rows(total), rows))
    losses = []
    for start in range(0, len(batches), accumulation):
        parts = batches[start : start + accumulation]
        count = sum(part["labels"][:, 1:].ne(-100).sum() for part in parts)
        step = 0.0
        for part in parts:
            outputs = model(**part, num_items_in_batch=count)
            auxiliary = outputs.logits.logsumexp(-1).square().mean() if name == "bamba" else outputs.aux_loss
            assert auxiliary > 0
            loss = outputs.loss - (1 - 1 / len(parts)) * COEFFICIENT * auxiliary
            loss.backward()
            step += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(step)
    return losses, model.state_dict()


def trained(folder, name, rows, accumulation, callback=None, wrapped=True, total=ROWS):
    """What a run of one epoch logs, its weights, and the log lines on rank 0."""
    model = build(name)
    model = bmt.auto_wrap(model) if wrapped else model
    steps = -(-total // (rows * bmt.world_size() * accumulation))
    args = jobs.arguments(
        folder, per_device_train_batch_size=rows, gradient_accumulation_steps=accumulation, max_steps=steps,
        train_sampling_strategy="sequential", optim="sgd", learning_rate=LEARNING_RATE,
    )  # fmt: skip
    callbacks = [callback or bmt.hf.BMTrainCallback()] if wrapped else []
    trainer = transformers.Trainer(model, args=args, train_dataset=jobs.Rows(total), callbacks=callbacks)
    with log_lines(logging.INFO) as lines:
        trainer.train()
    return [loss for (loss,) in jobs.losses(trainer.state.log_history)], jobs.weights(model), lines


def check_same(ours, plain):
    assert ours[0] == pytest.approx(plain[0], rel=1e-5)
    for name, value in plain[1].items():
        torch.testing.assert_close(ours[1][name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "name",
    [
        "mixtral",
        "bamba",
        *in_full(
            "peft", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "gpt_oss", "dbrx", "jetmoe", "jamba", "minimax",
            "minimax_m2", "qwen3_5_moe", "laguna", "mellum",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("size", "accumulation"), [(2, 2), pytest.param(1, 2, marks=slow)])
def test_as_one_process(world, tmp_path, name, size, accumulation):
    if name != "peft" and FAMILIES[name].missing:
        pytest.skip("not in this version of transformers")
    plain = plain_steps(name, 2, size * accumulation)  # 12 rows: on two ranks the last accumulation is short
    results = world(size)(trained, str(tmp_path), name, 2, accumulation)
    for ours in results:
        check_same(ours, plain)
    assert sum(f"{size * accumulation} times in a step" in line for line in results[0][2]) == 1


@pytest.mark.parametrize(("accumulation", "total"), [(1, 20), *rows_in_full([(1, 18), (2, 28)])])
def test_a_rank_without_rows_of_the_last_batch(world, tmp_path, accumulation, total):
    """Its repeated rows do not count, and the mean is that of the other ranks."""
    plain = plain_steps("mixtral", 4, 2 * accumulation, total)
    for ours in world(2)(trained, str(tmp_path), "mixtral", 4, accumulation, None, True, total):
        check_same(ours, plain)


def kept(folder):
    ours = trained(folder, "mixtral", 2, 2, callback=bmt.hf.BMTrainCallback(average_router_loss=False))
    return ours, trained(folder, "mixtral", 2, 2, wrapped=False)


@full
def test_the_switch_keeps_what_trainer_does(world, tmp_path):
    for ours, ddp in world(2)(kept, str(tmp_path)):
        check_same(ours, ddp)
        assert not any("auxiliary" in line for line in ours[2])


def evaluated_and_trained_again(folder, total):
    """A second Trainer of the same model, with a callback of its own, does not divide once more."""
    model = bmt.auto_wrap(build("mixtral"))
    plain = copy.deepcopy(build("mixtral")).eval()
    args = jobs.arguments(folder, per_device_eval_batch_size=2)
    found = []
    for _ in range(2):
        trainer = transformers.Trainer(
            model, args=args, eval_dataset=jobs.Rows(total), callbacks=[bmt.hf.BMTrainCallback()]
        )
        found.append(trainer.evaluate()["eval_loss"])
    batches = list(torch.utils.data.DataLoader(jobs.Rows(total), 2))
    expected = 0.0
    for start in range(0, len(batches), bmt.world_size()):
        parts = batches[start : start + bmt.world_size()]
        count = sum(part["labels"][:, 1:].ne(-100).sum() for part in parts)
        outputs = [plain(**part, num_items_in_batch=count) for part in parts]
        auxiliary = sum(output.aux_loss for output in outputs) * COEFFICIENT
        loss = sum(output.loss for output in outputs) - auxiliary + auxiliary / len(parts)
        expected += loss.item() * sum(len(part["labels"]) for part in parts)
    return found, expected / total


@full
@pytest.mark.parametrize(("size", "total"), [(1, ROWS), (2, ROWS), (2, ROWS - 2), (2, ROWS - 3)])
def test_evaluation_and_a_second_trainer(world, tmp_path, size, total):
    found, expected = world(size)(evaluated_and_trained_again, str(tmp_path), total)[0]
    assert found == [pytest.approx(expected, rel=1e-5)] * 2


class EvaluatesByAnother(transformers.TrainerCallback):
    """Evaluates the model with a Trainer of its own, which it keeps or drops, before the second step."""

    def __init__(self, keep, given):
        self.keep, self.given, self.kept = keep, given, None

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1:
            args = jobs.arguments(args.output_dir, per_device_eval_batch_size=2, **self.given)
            trainer = transformers.Trainer(
                model, args=args, eval_dataset=jobs.Rows(4), callbacks=[bmt.hf.BMTrainCallback()]
            )
            trainer.evaluate()
            self.kept = trainer if self.keep else None


def trained_and_evaluated(folder, make, other):
    """The log of two steps, during which another Trainer may use the model, and of evaluations around a third one."""
    model, data = bmt.auto_wrap(make()), jobs.Rows(8 * bmt.world_size())
    args = jobs.arguments(
        folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2, optim="sgd",
        per_device_eval_batch_size=2,
    )  # fmt: skip
    callbacks = [bmt.hf.BMTrainCallback()] if other is None else [EvaluatesByAnother(*other), bmt.hf.BMTrainCallback()]
    trainer = transformers.Trainer(model, args=args, train_dataset=data, eval_dataset=data, callbacks=callbacks)
    trainer.train()
    if other is not None:
        given = jobs.arguments(folder, **other[1])
        second = transformers.Trainer(model, args=given, callbacks=[bmt.hf.BMTrainCallback()])
        del second
        gc.collect()
    return jobs.losses(trainer.state.log_history, "grad_norm"), trainer.evaluate()["eval_loss"]


def bert_of_tokens():
    return bert("MaskedLM")()


UNAVERAGED = {"average_tokens_across_devices": False}


@pytest.mark.parametrize(
    ("make", "keep", "given"),
    [
        (mixtral, False, {}),
        *rows_in_full([(mixtral, True, {}), (mixtral, True, UNAVERAGED), (bert_of_tokens, True, UNAVERAGED)]),
    ],
)
def test_another_trainer_uses_the_model_meanwhile(world, tmp_path, make, keep, given):
    """Losses are those of the Trainer that computes."""
    expected = world(2)(trained_and_evaluated, str(tmp_path), make, None)
    for found, truth in zip(world(2)(trained_and_evaluated, str(tmp_path), make, (keep, given)), expected):
        assert found[0] == [pytest.approx(step, rel=1e-5) for step in truth[0]]
        assert found[1] == pytest.approx(truth[1], rel=1e-5)


def evaluated_mean(folder):
    """The evaluation loss of a model whose `loss_function` is a mean, and the mean of the ranks' losses."""
    model, plain = build("mixtral"), build("mixtral").eval()
    model.loss_function = plain.loss_function = mean_over_labels
    args = jobs.arguments(folder, per_device_eval_batch_size=2)
    data = jobs.Rows(2 * bmt.world_size())
    trainer = transformers.Trainer(
        bmt.auto_wrap(model), args=args, eval_dataset=data, callbacks=[bmt.hf.BMTrainCallback()]
    )
    parts = list(torch.utils.data.DataLoader(data, 2))
    counts = [part["labels"][:, 1:].ne(-100).sum() for part in parts]
    expected = sum(plain(**part).loss * count for part, count in zip(parts, counts)) / sum(counts)
    return trainer.evaluate()["eval_loss"], expected.item()


@full
def test_a_mean_is_averaged_as_a_whole(world, tmp_path):
    for found, expected in world(2)(evaluated_mean, str(tmp_path)):
        assert found == pytest.approx(expected, rel=1e-5)


class Trunk(torch.nn.Module):
    """Stands for the trunk of a model with images or audio, which enter as one vector a row."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(jobs.VOCABULARY, 8)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(2)])

    def forward(self, input_ids=None, features=None, **kwargs):
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        pictures = transformers.utils.ModelOutput(router_logits=hidden.mean((1, 2)))
        outputs = transformers.modeling_outputs.BaseModelOutputWithPast(last_hidden_state=hidden)
        outputs.cache, outputs.image_outputs, outputs["audio_features"] = None, pictures, features
        return outputs


def model_with_trunk(name):
    """The class of transformers, whose own forward computes the loss, around the small trunk."""
    with torch.device("meta"):
        model = getattr(transformers, name)(getattr(transformers, name).config_class())
    model.model, model.lm_head = Trunk(), torch.nn.Linear(8, jobs.VOCABULARY, bias=False)
    torch.nn.init.normal_(model.lm_head.weight, generator=torch.Generator().manual_seed(1))
    model.model.diffusion_head = None
    for config in (model.config, model.config.text_config):
        config.vocab_size = jobs.VOCABULARY
    model.config.tie_word_embeddings, model.config.density_router_loss_weight = False, COEFFICIENT
    model._tied_weights_keys, model.all_tied_weights_keys = {}, {}
    model.noise_scheduler = None
    return model.train()


class RowsWithFeatures(jobs.Rows):
    def __getitem__(self, index):
        row = super().__getitem__(index)
        mask = torch.zeros(len(row["labels"]), dtype=torch.bool)
        mask[index % 3] = True
        features = torch.full((8,), index / 10)
        return {**row, "router_labels": index % 2, "acoustic_loss_mask": mask, "features": features}


def squared_difference(head, features, conditions, *others):
    """In place of the loss of VibeVoice's diffusion head, which draws noise."""
    return (features - conditions).square().mean()


def train_with_trunk(folder, name, wrapped, rows, accumulation):
    model = model_with_trunk(name)
    model.compute_diffusion_loss = squared_difference
    model._build_default_noise_scheduler = lambda *args: None
    model.generation_config = None
    args = jobs.arguments(
        folder, per_device_train_batch_size=rows, gradient_accumulation_steps=accumulation, max_steps=3, optim="sgd",
        train_sampling_strategy="sequential", learning_rate=LEARNING_RATE, remove_unused_columns=False,
    )  # fmt: skip
    callbacks = [bmt.hf.BMTrainCallback()] if wrapped else []
    model = bmt.auto_wrap(model) if wrapped else model
    trainer = transformers.Trainer(model, args=args, train_dataset=RowsWithFeatures(), callbacks=callbacks)
    trainer.train()
    return [loss for (loss,) in jobs.losses(trainer.state.log_history)], jobs.weights(model)


@pytest.mark.parametrize("name", ["GraniteDoclingForConditionalGeneration", "VibeVoiceForConditionalGeneration"])
def test_another_mean_beside_the_cross_entropy(world, tmp_path, name):
    """It counts once, as in one process with the rows of all ranks and micro-batches."""
    if not hasattr(transformers, name):
        pytest.skip("not in this version of transformers")
    plain = train_with_trunk(str(tmp_path), name, False, 8, 1)
    for accumulation in (1, 2):
        for ours in world(2)(train_with_trunk, str(tmp_path), name, True, 4 // accumulation, accumulation):
            check_same(ours, plain)


class OwnMixture(torch.nn.Module):
    """A model of the user's program, without a configuration."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = torch.nn.Embedding(jobs.VOCABULARY, 8), torch.nn.Linear(8, jobs.VOCABULARY)
        self.aux_loss_coef = COEFFICIENT

    def computed(self, input_ids, labels):
        logits = self.head(self.embedding(input_ids))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits, "aux_loss": logits.logsumexp(-1).square().mean()}

    def forward(self, input_ids=None, labels=None, num_items_in_batch=None, **kwargs):
        outputs = self.computed(input_ids, labels)
        loss = outputs["loss"] * labels.numel() / num_items_in_batch
        return {**outputs, "loss": loss + self.aux_loss_coef * outputs["aux_loss"]}


class OwnMean(OwnMixture):
    """Its loss is a mean, and its coefficient is none of its attributes."""

    def __init__(self):
        super().__init__()
        del self.aux_loss_coef

    def forward(self, input_ids=None, labels=None, **kwargs):
        outputs, weights = self.computed(input_ids, labels), {"aux_loss_coef": COEFFICIENT}
        return {**outputs, "loss": outputs["loss"] + weights["aux_loss_coef"] * outputs["aux_loss"]}


class OwnArgument(OwnMixture):
    """Its forward has an argument with the name of a weight of transformers' models."""

    def forward(self, input_ids=None, labels=None, num_items_in_batch=None, z_loss_coefficient=0.0, **kwargs):
        return {"loss": self.computed(input_ids, labels)["loss"] * labels.numel() / num_items_in_batch}


class UnmaskedRows(jobs.Rows):
    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def train_own(folder, cls, wrapped, rows):
    model = bmt.auto_wrap(cls()) if wrapped else cls()
    args = jobs.arguments(
        folder, per_device_train_batch_size=rows, train_sampling_strategy="sequential", optim="sgd",
        learning_rate=LEARNING_RATE,
    )  # fmt: skip
    callbacks = [bmt.hf.BMTrainCallback()] if wrapped else []
    trainer = transformers.Trainer(model, args=args, train_dataset=UnmaskedRows(), callbacks=callbacks)
    trainer.train()
    return [loss for (loss,) in jobs.losses(trainer.state.log_history)], jobs.weights(model)


@pytest.mark.parametrize("cls", [OwnMixture, OwnMean, OwnArgument])
def test_names_of_coefficients_in_own_forwards(world, tmp_path, cls):
    """The coefficient may be an attribute of the model, or something else if nothing is to be divided."""
    plain = train_own(str(tmp_path), cls, False, 8)
    for ours in world(2)(train_own, str(tmp_path), cls, True, 4):
        check_same(ours, plain)
