"""TRL's trainers, unmodified, around a sharded model with adapters: against themselves around a plain one."""

import re

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import hf_bmtrain as bmt
from cases import full, in_full, rows_in_full
from jobs import CHECKPOINTING, check_same, losses, weights
from log_lines import log_lines
from ranks import on_ranks
from tiny_models import VOCABULARY, build

peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")

# Up to TRL 1.16 its trainers use the older names of transformers' activation checkpointing.
pytestmark = pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning")

ROWS, BATCH, STEPS = 40, 8, 5


def make_tokenizer():
    words = ["<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(VOCABULARY - 3))]
    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def sentences(kind):
    """Three to nine of the five words of this kind, which is soon learnt; each with a blank before it."""
    generator = torch.Generator().manual_seed(kind)
    lengths = torch.randint(3, 10, (ROWS,), generator=generator).tolist()
    words = [torch.randint(5 * kind, 5 * kind + 5, (length,), generator=generator).tolist() for length in lengths]
    return ["".join(f" w{word}" for word in row) for row in words]


def sft(given):
    return trl.SFTTrainer, trl.SFTConfig(**{"learning_rate": 4.0} | given), {"text": sentences(1)}


def dpo(given):
    columns = {"prompt": sentences(1), "chosen": sentences(2), "rejected": sentences(3)}
    return trl.DPOTrainer, trl.DPOConfig(**{"learning_rate": 1.0, "beta": 1.0} | given), columns


def digits(completions, **columns):
    """A reward that differs between the completions of a prompt."""
    return [sum(map(int, filter(str.isdigit, text))) / 10 for text in completions]


def grpo(given):
    options = {"learning_rate": 1.0, "num_generations": 4, "max_completion_length": 5, "beta": 0.1} | given
    return trl.GRPOTrainer, trl.GRPOConfig(**options), {"prompt": sentences(1)}


def lora(**options):
    """Adapters with random values: with the usual zeros half of them have no gradient."""
    options = {"r": 4, "lora_alpha": 16, "init_lora_weights": False, "task_type": "CAUSAL_LM"} | options
    return peft.LoraConfig(**{"target_modules": ["q_proj", "down_proj"]} | options)


def experts():
    parameters = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    return lora(target_modules=["q_proj"], target_parameters=parameters)


def scaled():
    return peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"],
        init_ia3_weights=False,
    )  # fmt: skip


def prompts():
    return peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)


def prefix():
    return peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)


METHODS = {
    "lora": ("llama", lora),
    "dora": ("llama", lambda: lora(use_dora=True)),
    "rslora": ("llama", lambda: lora(use_rslora=True)),
    "saved": ("llama", lambda: lora(modules_to_save=["lm_head"])),
    "experts": ("mixtral", experts),
    "ia3": ("llama", scaled),
    "prompts": ("llama", prompts),
    "prefix": ("llama", prefix),
}


def adapted(model, method):
    torch.manual_seed(5)  # as the trainer does before it makes them
    return peft.get_peft_model(model, METHODS[method][1]())


def base(method):
    model = build(METHODS[method][0])
    model.config.output_router_logits = False  # their loss is not a mean over rows
    return model


def plain(method):
    return adapted(base(method), method), {}


def plain_inside(method):
    return base(method), {"peft_config": METHODS[method][1]()}


def plain_reference(method):
    return base(method), {"ref_model": build("llama", seed=1)}


def before(method):
    return bmt.auto_wrap(adapted(base(method), method)), {}


def after(method):
    return bmt.auto_wrap(adapted(bmt.auto_wrap(base(method)), method)), {}


def inside(method):
    return bmt.auto_wrap(base(method)), {"peft_config": METHODS[method][1]()}


def reference(method):
    return bmt.auto_wrap(base(method)), {"ref_model": bmt.auto_wrap(build("llama", seed=1))}


def at_last(method):
    return adapted(base(method), method), {}


def make_trainer(kind, how, folder, size=1, given=None, method="lora", **options):
    """how: makes the model; `at_last` is wrapped in the trainer. given: goes before the defaults."""
    import datasets

    defaults = {
        "output_dir": folder, "max_steps": STEPS, "per_device_train_batch_size": BATCH // size, "logging_steps": 1,
        "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 1e9, "bf16": False, "use_cpu": True,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "seed": 5,
    }  # fmt: skip
    cls, args, columns = kind({**defaults, **(given or {})})
    model, more = how(method)
    if how in (before, after, inside, reference):
        options["callbacks"] = [bmt.hf.BMTrainCallback()]
    if kind is grpo:
        options["reward_funcs"] = digits
    trainer = cls(
        model=model, args=args, train_dataset=datasets.Dataset.from_dict(columns), processing_class=make_tokenizer(),
        **more, **options,
    )  # fmt: skip
    if how is at_last:
        bmt.auto_wrap(trainer.model)
        trainer.add_callback(bmt.hf.BMTrainCallback())
    return trainer


def train(kind, how, folder, size=1, given=None, resume=None, method="lora"):
    trainer = make_trainer(kind, how, folder, size, given, method)
    trainer.train(resume_from_checkpoint=resume)
    return {"history": trainer.state.log_history, "weights": weights(trainer.model)}


def train_sharded(kind, how, folder, given=None, method="lora"):
    return train(kind, how, folder, bmt.world_size(), given, method=method)


LOGGED = ("entropy", "mean_token_accuracy", "num_tokens")


def check(world, tmp_path, kind, how, truth, method="lora", logged=LOGGED, **given):
    expected = train(kind, truth, str(tmp_path / "plain"), given=given, method=method)
    moved = sum(rate * norm for _, norm, rate in losses(expected["history"], "grad_norm", "learning_rate"))
    assert moved > 0.01, "the weights have hardly moved, so that agreeing says little"
    for ours in world(2)(train_sharded, kind, how, str(tmp_path / "ours"), given, method):
        check_same(ours, expected, "grad_norm", *logged)


@pytest.mark.parametrize("how", [after, *in_full(before, inside, at_last)])
def test_sft(world, tmp_path, how):
    """Adapters come before auto_wrap, after it, from the trainer; or all is wrapped when the trainer is made."""
    check(world, tmp_path, sft, how, plain)


@full
@pytest.mark.parametrize(
    ("method", "rate"),
    [("saved", 0.5), *rows_in_full([("dora", 4), ("rslora", 4), ("ia3", 40), ("prompts", 200), ("prefix", 20)])],
)
def test_sft_methods(world, tmp_path, method, rate):
    """PEFT's other methods, put in by the trainer; `modules_to_save` copies a sharded module."""
    unchecked = dict.fromkeys(CHECKPOINTING, False)  # which a prefix cannot go through in plain transformers
    check(world, tmp_path, sft, inside, plain_inside, method, learning_rate=rate, **unchecked)


@full
@pytest.mark.parametrize(
    ("how", "truth"), [(inside, plain_inside), *rows_in_full([(at_last, plain), (reference, plain_reference)])]
)
def test_dpo(world, tmp_path, how, truth):
    """The reference is the base without adapters, a second adapter that TRL copies from the first, a second model."""
    check(world, tmp_path, dpo, how, truth, learning_rate=0.1 if how is reference else 1.0)


def reward(given):
    options = {"learning_rate": 0.5, "center_rewards_coefficient": 0.01, "max_length": None} | given
    return trl.RewardTrainer, trl.RewardConfig(**options), {"chosen": sentences(2), "rejected": sentences(3)}


def scorer():
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForSequenceClassification(config)


def plain_scorer(method):
    return scorer(), {"peft_config": lora(task_type="SEQ_CLS")}


def scorer_inside(method):
    return bmt.auto_wrap(scorer()), {"peft_config": lora(task_type="SEQ_CLS"), "callbacks": [bmt.hf.BMTrainCallback()]}


@full
def test_reward(world, tmp_path):
    """PEFT adds a copy of the head to the adapters of a classifier."""
    check(world, tmp_path, reward, scorer_inside, plain_scorer, logged=("accuracy", "margin", "mean_reward"))


def averaged(how, folder):
    trainer = make_trainer(sft, how, folder, bmt.world_size(), {"learning_rate": 1.0})
    trainer.add_callback(trl.BEMACallback(update_freq=2))
    trainer.train()
    bmt.synchronize()
    return weights(type(build("llama")).from_pretrained(f"{folder}/bema"))


def plain_alone(method):
    return base(method), {}


def sharded_alone(method):
    return bmt.auto_wrap(base(method)), {"callbacks": [bmt.hf.BMTrainCallback()]}


@full
def test_averages_of_bema(world, tmp_path):
    """TRL's callback makes a second model of the class of the first, averages into it, and rank 0 saves it."""
    (expected,) = world(1)(averaged, plain_alone, str(tmp_path / "plain"))
    for ours in world(2)(averaged, sharded_alone, str(tmp_path / "ours")):
        for name, value in expected.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5, msg=name)


@full
@pytest.mark.parametrize("how", [after, before])
def test_dpo_on_a_sharded_adapter(world, tmp_path, how):
    """TRL copies an adapter into a second one, the reference, also where the first one is sharded."""
    check(world, tmp_path, dpo, how, plain, learning_rate=1.0)


@full
@pytest.mark.parametrize(
    ("kind", "how", "truth", "method"),
    [
        (grpo, inside, plain_inside, "lora"),
        *rows_in_full([(grpo, before, plain, "lora"), (sft, inside, plain_inside, "experts")]),
    ],
)
@pytest.mark.parametrize("size", [2, *in_full(1)])
def test_like_as_many_processes(world, tmp_path, size, kind, how, truth, method):
    """The truth is TRL's job on as many ranks, by DistributedDataParallel.

    In GRPO each samples tokens of its own, and sums of experts depend on how many rows there are.
    """
    expected = world(size)(train_sharded, kind, truth, str(tmp_path / "plain"), None, method)
    assert all(norm > 0 for _, norm in losses(expected[0]["history"], "grad_norm"))
    names = ("reward", "kl", "completions/mean_length") if kind is grpo else ("entropy", "mean_token_accuracy")
    for ours, plainly in zip(world(size)(train_sharded, kind, how, str(tmp_path / "ours"), None, method), expected):
        check_same(ours, plainly, "grad_norm", *names)


def gpt2(method):
    return build("gpt2"), {}


def sharded_gpt2(method):
    return bmt.auto_wrap(build("gpt2")), {"callbacks": [bmt.hf.BMTrainCallback()]}


def evaluate(kind, how, folder, size, given, columns, method="lora", **options):
    """The loss of an evaluation with 8 rows a batch on all ranks together, and what is told of it."""
    import datasets

    rows = datasets.Dataset.from_dict(columns)
    given = {"per_device_eval_batch_size": BATCH // size, **given}
    trainer = make_trainer(kind, how, folder, size, given, method, eval_dataset=rows, **options)
    with log_lines() as lines:
        return trainer.evaluate()["eval_loss"], lines


def evaluate_sharded(kind, how, folder, *arguments):
    return evaluate(kind, how, folder, bmt.world_size(), *arguments)


def evaluate_shifted(how, folder):
    columns = {"text": [" w5 w6 w7" * 5] * 4 + [" w8 w9 w2"] * 4}
    return evaluate(sft, how, folder, bmt.world_size(), {}, columns, data_collator=shift)[0]


def shift(rows):
    """A batch whose `shift_labels` keep two labels of each row, so that they are others than the later `labels`."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    labels = torch.nn.functional.pad(ids, (0, 1))[:, 1:].where(torch.arange(ids.shape[1]) < 2, -100)
    mask = ids.ne(0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask.bool(), -100), "shift_labels": labels}


@full
def test_sft_counts_shift_labels(world, tmp_path):
    """If a collator makes them, the loss uses them in place of `labels`. Rows of one rank are longer."""
    (expected,) = world(1)(evaluate_shifted, gpt2, str(tmp_path / "plain"))
    for loss in world(2)(evaluate_shifted, sharded_gpt2, str(tmp_path / "ours")):
        assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("how", "truth", "method"),
    [
        (sharded_gpt2, gpt2, "lora"),
        *rows_in_full([(inside, plain_inside, "lora"), (inside, plain_inside, "prompts")]),
        *rows_in_full([(inside, plain_inside, "prefix")]),
    ],
)
def test_sft_counts_its_labels(world, tmp_path, how, truth, method):
    """The first label of each row counts with virtual tokens before it alone. Rows of one rank are longer."""
    columns = {"text": [" w5" * length for length in [14] * 4 + [2] * 4]}
    expected, _ = evaluate(sft, truth, str(tmp_path / "plain"), 1, {}, columns, method)
    for loss, lines in world(2)(evaluate_sharded, sft, how, str(tmp_path / "ours"), {}, columns, method):
        assert loss == pytest.approx(expected, rel=1e-5) and not lines


@pytest.mark.parametrize("size", [6, *in_full(5)])
def test_grpo_evaluates(world, tmp_path, size):
    """4 completions of each of 6 prompts fill 3 batches, although 6 is not a multiple of 8. 5 prompts leave 4 rows."""
    given, columns = {"top_k": 1, "beta": 100.0}, {"prompt": sentences(1)[:size]}  # all take the likeliest tokens
    expected, _ = evaluate(grpo, plain_inside, str(tmp_path / "plain"), 1, given, columns)
    results = world(2)(evaluate_sharded, grpo, inside, str(tmp_path / "ours"), given, columns)
    if size == 6:
        assert expected > 0.01
        assert all(loss == pytest.approx(expected, rel=1e-4) and not lines for loss, lines in results)
    else:
        assert "the last evaluation batch has 4 rows for 2 ranks" in results[0][1][0] and not results[1][1]


@on_ranks(2)
def test_continuous_batching_is_refused(folder):
    names = [*filter(re.compile("use_.*(paged|continuous_batching)").fullmatch, trl.GRPOConfig.__dataclass_fields__)]
    assert names
    for name in names:
        with pytest.raises(ValueError, match="=True does not work with several ranks"):
            make_trainer(grpo, after, folder, size=2, given={name: True})
    with pytest.raises(RuntimeError, match=r"Continuous batching .* Use generate\(\)"):
        bmt.auto_wrap(build("llama")).generate_batch([[3, 4]], max_new_tokens=2)


@on_ranks(2, full=(1,))
def test_checkpoints(folder):
    """A checkpoint holds the adapters alone, PEFT loads them, and training goes on from them."""
    size, given = bmt.world_size(), {"save_strategy": "steps", "save_steps": 3, "optim": "adamw_torch"}
    through = train(sft, inside, folder, size, given)["weights"]
    stopped = f"{folder}/checkpoint-3"
    model = peft.PeftModel.from_pretrained(build("llama"), stopped)
    assert list(weights(model)) == list(through)
    changed = [name for name, value in weights(model).items() if not torch.equal(value, through[name])]
    assert changed and all("lora_" in name for name in changed)
    resumed = train(sft, inside, folder, size, given, stopped)["weights"]
    assert all(torch.equal(value, through[name]) for name, value in resumed.items())


@full
@on_ranks(1)
def test_optimizer_from_before_the_adapters(folder):
    model = bmt.auto_wrap(build("llama"))
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-3)
    options = {"peft_config": lora(), "optimizers": (optimizer, None)}
    trainer = make_trainer(sft, lambda method: (model, {}), folder, callbacks=[bmt.hf.BMTrainCallback()], **options)
    with pytest.raises(RuntimeError, match="All 30 parameters of AdamOptimizer are frozen"):
        trainer.train()
