"""An unmodified Trainer around a sharded model, against itself around a plain one in one process."""

import copy

import pytest
import transformers

import hf_bmtrain as bmt
import jobs
from cases import full, in_full, rows_in_full
from jobs import check_same, losses, sgd, train, train_sharded

SIZES = [2, *in_full(1)]
MOSTLY_TWO = [pytest.param(1, marks=pytest.mark.slow), 2]


@pytest.mark.parametrize(("family", "tied"), [("gpt2", True), *rows_in_full([("bert", False), ("t5", True)])])
@pytest.mark.parametrize("size", MOSTLY_TWO)
def test_families(world, tmp_path, size, family, tied):
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    options = {"family": family, "tied": tied}
    plain = train(tmp_path / "plain", False, given, **options)
    for ours in world(size)(train_sharded, str(tmp_path / "ours"), given, options):
        check_same(ours, plain, "grad_norm")


def reported(folder):
    from transformers import TrainerCallback

    seen = []

    class Reporter(TrainerCallback):
        """Stands before ours, as TensorBoard's does."""

        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    size = bmt.world_size()
    stock = jobs.make_trainer(folder, True, {}, size=size, callbacks=[Reporter()])
    stock.train()
    early, seen[:] = list(seen), []
    model = bmt.auto_wrap(jobs.build("llama"))
    given = {"per_device_train_batch_size": 8 // size}
    ours = bmt.hf.Trainer(
        model=model, args=jobs.arguments(folder, **given), train_dataset=jobs.Rows(), optimizers=(sgd(model), None),
        callbacks=[Reporter()],
    )  # fmt: skip
    ours.train()
    return stock.state.log_history, stock.state.total_flos, early, seen, losses(ours.state.log_history, "grad_norm")


@pytest.mark.parametrize("size", SIZES)
def test_reports(world, tmp_path, size):
    """Rates count all ranks' rows; our Trainer shows them to reporters that come first."""
    plain = jobs.make_trainer(tmp_path / "plain", False, {})
    plain.train()
    history, flops, early, late, logged = world(size)(reported, str(tmp_path / "ours"))[0]
    assert flops == plain.state.total_flos > 0
    entries = [entry for entry in history if "loss" in entry]
    assert len(entries) == 3
    multiplying = sum(p.numel() for n, p in plain.model.named_parameters() if "embed_tokens" not in n)
    for entry in entries:
        assert entry["tokens_per_second"] == pytest.approx(entry["samples_per_second"] * jobs.LENGTH, rel=1e-3)
        flops_a_token = 6 * multiplying + 12 * 3 * 24 * jobs.LENGTH
        rate = entry["tokens_per_second"] * flops_a_token / size / 1e12
        assert entry["model_tflops_per_device"] == pytest.approx(rate, rel=1e-3)
        assert 0.05 < entry["peak_memory_gib"] < 50
    seconds = sum(8 / entry["samples_per_second"] for entry in entries)
    assert seconds < next(entry for entry in history if "train_runtime" in entry)["train_runtime"] + 0.5
    assert "tokens_per_second" not in early[0]
    assert all("tokens_per_second" in logs for logs in late if "loss" in logs)
    theirs = [(entry["loss"], entry["grad_norm"]) for entry in plain.state.log_history if "loss" in entry]
    for here, there in zip(logged, theirs):
        assert here == pytest.approx(there, rel=1e-5)


def made_by_position(folder):
    """The callbacks of Trainers that get all arguments by position, and whether they have the optimizer after these."""

    class Own(transformers.TrainerCallback):
        pass

    model, found = bmt.auto_wrap(jobs.build("llama")), []
    args, optimizer = jobs.arguments(folder), sgd(model)
    before = model, args, None, jobs.Rows(), *[None] * 5
    for callbacks in ([Own()], (Own(), bmt.hf.BMTrainCallback()), None):
        trainer = bmt.hf.Trainer(*before, callbacks, (optimizer, None))
        kinds = {Own: "own", bmt.hf.BMTrainCallback: "ours"}
        used = [kinds[type(each)] for each in trainer.callback_handler.callbacks if type(each) in kinds]
        found.append((used, trainer.optimizer is optimizer))
    for options, message in (({"callbacks": []}, "multiple values"), ({}, "callbacks must be a list")):
        with pytest.raises(TypeError, match=message):
            bmt.hf.Trainer(*before, [] if options else 1, **options)
    return found


def test_arguments_by_position(world, tmp_path):
    found = [(["own", "ours"], True), (["own", "ours"], True), (["ours"], True)]
    assert world(1)(made_by_position, str(tmp_path)) == [found]


def made_by_model_init(folder, wrapped):
    """A new model for every train(); the first one's optimizer and files are left behind."""
    size = bmt.world_size() if wrapped else 1
    trainer = (bmt.hf.Trainer if wrapped else transformers.Trainer)(
        model_init=lambda: bmt.auto_wrap(jobs.build("llama")) if wrapped else jobs.build("llama"),
        args=jobs.arguments(folder, per_device_train_batch_size=8 // size, optim="sgd"), train_dataset=jobs.Rows(),
    )  # fmt: skip
    runs = []
    for _ in range(2):
        trainer.train()
        runs.append({"history": list(trainer.state.log_history), "weights": jobs.weights(trainer.model)})
    return runs


@full
@pytest.mark.parametrize("size", MOSTLY_TWO)
def test_model_init(world, tmp_path, size):
    plain = made_by_model_init(tmp_path / "plain", False)
    for run, expected in zip(world(size)(made_by_model_init, str(tmp_path / "ours"), True)[0], plain):
        check_same(run, expected, "grad_norm")


def trained_twice(folder, wrapped):
    trainer = jobs.make_trainer(folder, wrapped, {}, size=bmt.world_size() if wrapped else 1)
    trainer.train()
    trainer.train()
    return {"history": trainer.state.log_history, "weights": jobs.weights(trainer.model)}


@full
@pytest.mark.parametrize("size", MOSTLY_TWO)
def test_trained_twice(world, tmp_path, size):
    plain = trained_twice(tmp_path / "plain", False)
    check_same(world(size)(trained_twice, str(tmp_path / "ours"), True)[0], plain, "grad_norm")


def copied_with_adapters(folder):
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    plain, model = (peft.get_peft_model(jobs.build("llama"), config) for _ in range(2))
    trainer = transformers.Trainer(
        bmt.auto_wrap(model), args=jobs.arguments(folder, max_steps=1), train_dataset=jobs.Rows(),
        callbacks=[bmt.hf.BMTrainCallback()],
    )  # fmt: skip
    trainer.train()
    count = trainer.model.num_parameters(exclude_embeddings=True)
    assert count == plain.num_parameters(exclude_embeddings=True)
    copied = copy.deepcopy(trainer.model)
    assert "num_parameters" not in vars(copied)
    copied.merge_and_unload().save_pretrained(f"{folder}/{bmt.rank()}")


@pytest.mark.parametrize("size", SIZES)
def test_a_copy_of_a_model_with_adapters(world, tmp_path, size):
    """The copy had the callback's count of parameters, which cannot be copied."""
    pytest.importorskip("peft")
    world(size)(copied_with_adapters, str(tmp_path))
