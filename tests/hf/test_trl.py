"""TRL's trainers, unmodified, around a sharded model with adapters: against themselves around a plain one."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import hf_bmtrain as bmt
from jobs import check_same, losses, weights
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


def lora():
    """Adapters with random values: with the usual zeros half of them have no gradient."""
    return peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )


def adapted(model):
    torch.manual_seed(5)  # as the trainer does before it makes them
    return peft.get_peft_model(model, lora())


def plain():
    return adapted(build("llama")), {}


def plain_inside():
    return build("llama"), {"peft_config": lora()}


def plain_reference():
    return build("llama"), {"ref_model": build("llama", seed=1)}


def before():
    return bmt.auto_wrap(adapted(build("llama"))), {}


def after():
    return bmt.auto_wrap(adapted(bmt.auto_wrap(build("llama")))), {}


def inside():
    return bmt.auto_wrap(build("llama")), {"peft_config": lora()}


def reference():
    return bmt.auto_wrap(build("llama")), {"ref_model": bmt.auto_wrap(build("llama", seed=1))}


def at_last():
    return adapted(build("llama")), {}


def make_trainer(kind, how, folder, size=1, given=None, **options):
    """kind: sft or dpo. how: makes the model; `at_last` is wrapped in the trainer. given: goes before the defaults."""
    import datasets

    defaults = {
        "output_dir": folder, "max_steps": STEPS, "per_device_train_batch_size": BATCH // size, "logging_steps": 1,
        "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 1e9, "bf16": False, "use_cpu": True,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "seed": 5,
    }  # fmt: skip
    cls, args, columns = kind({**defaults, **(given or {})})
    model, more = how()
    if how in (before, after, inside, reference):
        options["callbacks"] = [bmt.hf.BMTrainCallback()]
    trainer = cls(
        model=model, args=args, train_dataset=datasets.Dataset.from_dict(columns), processing_class=make_tokenizer(),
        **more, **options,
    )  # fmt: skip
    if how is at_last:
        bmt.auto_wrap(trainer.model)
        trainer.add_callback(bmt.hf.BMTrainCallback())
    return trainer


def train(kind, how, folder, size=1, given=None, resume=None):
    trainer = make_trainer(kind, how, folder, size, given)
    trainer.train(resume_from_checkpoint=resume)
    return {"history": trainer.state.log_history, "weights": weights(trainer.model)}


def train_sharded(kind, how, folder, given):
    return train(kind, how, folder, bmt.world_size(), given)


def check(world, tmp_path, kind, how, truth, **given):
    expected = train(kind, truth, str(tmp_path / "plain"), given=given)
    (first,), *_, (last,) = losses(expected["history"])
    assert abs(first - last) > 0.01 * first  # it has moved, so agreeing says something
    for ours in world(2)(train_sharded, kind, how, str(tmp_path / "ours"), given):
        check_same(ours, expected, "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")


@pytest.mark.parametrize("how", [before, after, inside, at_last])
def test_sft(world, tmp_path, how):
    """Adapters come before auto_wrap, after it, from the trainer; or all is wrapped when the trainer is made."""
    check(world, tmp_path, sft, how, plain)


@pytest.mark.parametrize(("how", "truth"), [(inside, plain_inside), (at_last, plain), (reference, plain_reference)])
def test_dpo(world, tmp_path, how, truth):
    """The reference is the base without adapters, a second adapter that TRL copies from the first, a second model."""
    check(world, tmp_path, dpo, how, truth, learning_rate=0.1 if how is reference else 1.0)


@pytest.mark.parametrize("how", [before, after])
def test_dpo_on_a_sharded_adapter(world, tmp_path, how):
    """TRL copies an adapter into a second one, the reference, also where the first one is sharded."""
    check(world, tmp_path, dpo, how, plain, learning_rate=1.0)


def saved_and_resumed(folder):
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


@pytest.mark.parametrize("size", [1, 2])
def test_checkpoints(world, tmp_path, size):
    world(size)(saved_and_resumed, str(tmp_path))


def optimizer_from_before_the_adapters(folder):
    model = bmt.auto_wrap(build("llama"))
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-3)
    options = {"peft_config": lora(), "optimizers": (optimizer, None)}
    trainer = make_trainer(sft, lambda: (model, {}), folder, callbacks=[bmt.hf.BMTrainCallback()], **options)
    with pytest.raises(RuntimeError, match="All 30 parameters that AdamOptimizer holds are frozen"):
        trainer.train()


def test_optimizer_from_before_the_adapters(world, tmp_path):
    world(1)(optimizer_from_before_the_adapters, str(tmp_path))
