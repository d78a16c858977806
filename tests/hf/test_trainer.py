"""An unmodified Trainer around a sharded model, against itself around a plain one in one process."""

import math

import jobs
import pytest
import torch
import transformers
from jobs import bmt_adam, check_same, losses, sgd, torch_adam, train, train_ddp, train_sharded

import hf_bmtrain as bmt

SIZES = [1, 2]
MOSTLY_TWO = [pytest.param(1, marks=pytest.mark.slow), 2]
ARGUMENTS = {
    "plain": {},
    "accumulation": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "accumulation with a rest": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "max_steps": 4},
    "clipping": {"max_grad_norm": 0.3},
    "clipping what was accumulated": {
        "max_grad_norm": 0.3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2
    },
    "no clipping": {"max_grad_norm": 0.0},
    "warm-up and decline": {"warmup_steps": 2, "lr_scheduler_type": "linear", "max_steps": 5},
    "cosine": {"lr_scheduler_type": "cosine", "max_steps": 5},
    "label smoothing": {"label_smoothing_factor": 0.2},
    "recomputation": {"gradient_checkpointing": True},
    "logging every other step": {"logging_steps": 2, "max_steps": 4},
    "grouped by length": (
        {"train_sampling_strategy": "group_by_length"}
        if hasattr(transformers.TrainingArguments, "train_sampling_strategy")
        else {"group_by_length": True}  # as the first of transformers 5 name it
    ),
    "data seed": {"data_seed": 11},
    "epochs": {"max_steps": -1, "num_train_epochs": 2, "logging_strategy": "epoch"},
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("size", MOSTLY_TWO)
def test_arguments(world, tmp_path, size, name):
    given = ARGUMENTS[name]
    options = {"use_checkpoint": "recomputation" not in name}
    plain = train(tmp_path / "plain", False, given)
    for ours in world(size)(train_sharded, str(tmp_path / "ours"), given, options):
        check_same(ours, plain, "grad_norm", "learning_rate")


@pytest.mark.parametrize(("family", "tied"), [("gpt2", True), ("bert", False), ("t5", True), ("mixtral", False)])
@pytest.mark.parametrize("size", MOSTLY_TWO)
def test_families(world, tmp_path, size, family, tied):
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    options = {"family": family, "tied": tied}
    if family == "gpt2" or size == 1:
        plain = train(tmp_path / "plain", False, given, **options)
    else:
        # These losses are means over each rank's own tokens, whatever num_items_in_batch says, and Trainer multiplies
        # them by the number of ranks: with several, its own DistributedDataParallel is the truth.
        plain = world(size)(train_ddp, str(tmp_path / "plain"), given, options)[0]
    for ours in world(size)(train_sharded, str(tmp_path / "ours"), given, options):
        check_same(ours, plain, "grad_norm")


def test_tokens_averaged_on_each_rank(world, tmp_path):
    """average_tokens_across_devices=False: as Trainer's own DistributedDataParallel."""
    given = {"average_tokens_across_devices": False}
    plain = world(2)(train_ddp, str(tmp_path / "plain"), given, {})[0]
    ours = world(2)(train_sharded, str(tmp_path / "ours"), given, {})[0]
    check_same(ours, plain, "grad_norm")
    together = train(tmp_path / "together", False, {})
    assert not math.isclose(losses(plain["history"])[0][0], losses(together["history"])[0][0], rel_tol=2e-5)


@pytest.mark.parametrize("size", MOSTLY_TWO)
def test_optimizers(world, tmp_path, size):
    """Trainer's own choice, ours, and one of torch's by class and arguments."""
    given = {"learning_rate": 1e-3, "adam_epsilon": 1e-6, "weight_decay": 0.01, "max_steps": 4}
    cases = [
        ({"make_optimizer": None}, {"make_optimizer": None}),
        ({"make_optimizer": bmt_adam}, {"make_optimizer": torch_adam}),
        *[
            ({"make_optimizer": None, "optimizer_cls_and_kwargs": (cls, {"lr": 1e-2, "eps": 1e-3})},) * 2
            for cls in (torch.optim.RMSprop, torch.optim.Adagrad)
        ],
    ]
    for mine, theirs in cases:
        plain = train(tmp_path / "plain", False, given, **theirs)
        ours = world(size)(train_sharded, str(tmp_path / "ours"), given, mine)[0]
        check_same(ours, plain, "grad_norm", tolerance=3e-5)


@pytest.mark.parametrize("size", SIZES)
def test_bf16(world, tmp_path, size):
    """Autocast takes effect, in evaluation too: the numbers before the first update are those of plain bf16."""
    given = {"bf16": True, "eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    options = {"eval_dataset": jobs.Rows(seed=8)}
    plain, wide = (train(tmp_path / "plain", False, {**given, "bf16": half}, **options) for half in (True, False))
    ours = world(size)(train_sharded, str(tmp_path / "ours"), given, options)[0]
    for name in ("loss", "eval_loss"):
        mine, half, full = (
            next(entry[name] for entry in run["history"] if name in entry) for run in (ours, plain, wide)
        )
        assert abs(mine - half) < 0.2 * abs(half - full), name
    for (mine,), (half,) in zip(losses(ours["history"]), losses(plain["history"])):
        assert mine == pytest.approx(half, abs=2e-4)
    assert all(value.dtype == torch.float32 for value in ours["weights"].values())


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def evaluated(folder, wrapped, size):
    """Evaluated before any training (by a Trainer of its own: stock Trainer would leave out DDP afterwards), during it
    and after it."""
    rows = jobs.Rows(size=21, seed=8)  # no multiple of the batch
    given = {"eval_strategy": "steps", "eval_steps": 2}
    options = {"size": size, "eval_dataset": rows, "compute_metrics": accuracy}
    first = jobs.make_trainer(folder, wrapped, given, **options).evaluate()
    trainer = jobs.make_trainer(folder, wrapped, given, **options)
    trainer.train()
    predicted = trainer.predict(rows)
    evals = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    return {"first": first, "evals": evals, "logits": predicted.predictions, "metrics": predicted.metrics}


def evaluated_on_ranks(folder, wrapped):
    return evaluated(folder, wrapped, bmt.world_size())


@pytest.mark.parametrize("size", SIZES)
def test_evaluation_and_prediction(world, tmp_path, size):
    """Losses as Trainer alone has them on as many ranks (means of batches, so they depend on the batch's size)."""
    alone = evaluated(tmp_path / "alone", False, 1)
    plain = world(size)(evaluated_on_ranks, str(tmp_path / "plain"), False)[0] if size > 1 else alone
    for ours in world(size)(evaluated_on_ranks, str(tmp_path / "ours"), True):
        assert len(ours["evals"]) == len(plain["evals"]) == 2
        pairs = [(ours["first"], plain["first"]), *zip(ours["evals"], plain["evals"])]
        for here, there in pairs:
            assert here["eval_loss"] == pytest.approx(there["eval_loss"], rel=1e-5)
            assert here["eval_accuracy"] == pytest.approx(there["eval_accuracy"], abs=1e-9)
        assert ours["metrics"]["test_loss"] == pytest.approx(plain["metrics"]["test_loss"], rel=1e-5)
        assert ours["logits"].shape == plain["logits"].shape == (21, jobs.LENGTH, jobs.VOCABULARY)
        assert abs(ours["logits"] - alone["logits"]).max() < 1e-5


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


def compiled(folder, wrapped):
    """Blocks compile (with a backend that needs no compiler here), and the numbers stay."""
    import os

    import torch._dynamo

    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    given = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    try:
        trainer = jobs.make_trainer(folder, wrapped, given, size=bmt.world_size())
        trainer.train()
    finally:
        for name in [name for name in os.environ if name.startswith("ACCELERATE_DYNAMO_")]:
            del os.environ[name]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before
    return {"history": trainer.state.log_history, "weights": jobs.weights(trainer.model)}


@pytest.mark.parametrize("size", MOSTLY_TWO)
def test_torch_compile(world, tmp_path, size):
    plain = train(tmp_path / "plain", False, {})
    ours = world(size)(compiled, str(tmp_path / "ours"), True)[0]
    check_same(ours, plain, "grad_norm")


def noisy(folder):
    """Neftune's noise is added to embeddings that are gathered; after training the hook is gone."""
    runs = []
    for given in ({}, {"neftune_noise_alpha": 5}):
        runs.append(jobs.make_trainer(folder, True, given, size=bmt.world_size()))
        runs[-1].train()
    assert not runs[1].model.get_input_embeddings()._forward_hooks
    return [{"history": run.state.log_history, "weights": jobs.weights(run.model)} for run in runs]


@pytest.mark.parametrize("size", MOSTLY_TWO)
def test_neftune(world, tmp_path, size):
    plain = train(tmp_path / "plain", False, {"neftune_noise_alpha": 5})
    silent, ours = world(size)(noisy, str(tmp_path / "ours"))[0]
    if size == 1:
        check_same(ours, plain, "grad_norm")
    assert losses(ours["history"]) != losses(silent["history"])


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


@pytest.mark.parametrize("size", MOSTLY_TWO)
def test_trained_twice(world, tmp_path, size):
    plain = trained_twice(tmp_path / "plain", False)
    check_same(world(size)(trained_twice, str(tmp_path / "ours"), True)[0], plain, "grad_norm")


def stopped_early(folder, wrapped):
    given = {
        "max_steps": 8, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1,
        "load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 3.0, "save_total_limit": 1,
    }  # fmt: skip
    trainer = jobs.make_trainer(
        folder, wrapped, given, size=bmt.world_size() if wrapped else 1, eval_dataset=jobs.Rows(seed=9),
        make_optimizer=fast_sgd, callbacks=[transformers.EarlyStoppingCallback(early_stopping_patience=2)],
    )  # fmt: skip
    trainer.train()
    return trainer.state.global_step, trainer.state.best_metric


def fast_sgd(model):
    return sgd(model, 5.0)


@pytest.mark.parametrize("size", MOSTLY_TWO)
def test_early_stopping(world, tmp_path, size):
    step, metric = stopped_early(tmp_path / "plain", False)
    assert step < 8
    for here in world(size)(stopped_early, str(tmp_path / "ours"), True):
        assert here == (step, pytest.approx(metric, rel=1e-4))


def translated(folder, wrapped):
    """Seq2SeqTrainer generates in evaluation, on every rank as long as the longest."""
    size = bmt.world_size() if wrapped else 1
    trainer = jobs.make_trainer(
        folder, wrapped, {"predict_with_generate": True, "generation_max_length": 9}, size=size, family="t5",
        cls=transformers.Seq2SeqTrainer, eval_dataset=jobs.Rows(seed=9),
    )  # fmt: skip
    return trainer.predict(jobs.Rows(seed=9)).predictions


@pytest.mark.parametrize("size", MOSTLY_TWO)
def test_seq2seq_trainer(world, tmp_path, size):
    plain = translated(tmp_path / "plain", False)
    for ours in world(size)(translated, str(tmp_path / "ours"), True):
        assert (ours == plain).all()
