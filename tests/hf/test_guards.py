"""What would train wrongly in silence is one clear error, at the first step at the latest."""

import dataclasses
import functools
import types

import pytest
import torch
import transformers

import hf_bmtrain as bmt
import jobs
from cases import by_default, full, in_full
from hf_bmtrain.hf import arguments
from log_lines import log_lines
from tiny_models import batch, build
from twins import Tower, ids

SIZES = [2, *in_full(1)]


def step(model, *optimizers):
    model(ids(0, bmt.rank())).backward()
    for optimizer in optimizers:
        optimizer.step()


def optimizer_from_before():
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bmt.auto_wrap(model)
    with pytest.raises(RuntimeError, match=r"SGD has parameters from before .*12 of 12.* Create the optimizer after"):
        step(model, optimizer)


def our_optimizer_from_before_beside_new_parameters():
    model = Tower()
    optimizer = bmt.optim.AdamOptimizer(model.head.parameters(), lr=0.1)
    bmt.auto_wrap(model)
    optimizer.add_param_group({"params": list(model.layers.parameters())})
    with pytest.raises(RuntimeError, match=r"AdamOptimizer has parameters from before .*\(2 of"):
        step(model, optimizer)


def optimizer_from_before_in_trainer(folder):
    model = build("llama")
    optimizer = jobs.sgd(model)
    bmt.auto_wrap(model)
    trainer = transformers.Trainer(
        model=model, args=jobs.arguments(folder), train_dataset=jobs.Rows(), optimizers=(optimizer, None),
        callbacks=[bmt.hf.BMTrainCallback()],
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="Create the optimizer after auto_wrap"):
        trainer.train()


def hyperparameter_search(folder):
    """Trainer saves a trial to run-0/checkpoint-2, but this package would save it to checkpoint-2."""
    args = jobs.arguments(folder, save_strategy="steps")
    search = transformers.TrainerState(is_hyper_param_search=True)
    with pytest.raises(ValueError, match="folder of its own.* Pass save_strategy='no'"):
        bmt.hf.BMTrainCallback().on_train_begin(args, search, transformers.TrainerControl())


def trainer_without_callback(folder):
    model = bmt.auto_wrap(build("llama"))
    args = jobs.arguments(folder)
    make = functools.partial(transformers.Trainer, model=model, args=args, train_dataset=jobs.Rows())
    make(callbacks=[bmt.hf.BMTrainCallback()]).train()
    with pytest.raises(RuntimeError, match="on 2 ranks without BMTrainCallback: .* Pass callbacks="):
        make().train()
    make(eval_dataset=jobs.Rows()).evaluate()
    model.zero_grad()
    Distilled(model=build("llama"), args=args, train_dataset=jobs.Rows(), teacher=model).train()


class Distilled(transformers.Trainer):
    """Trains a plain model; its teacher is sharded."""

    def __init__(self, *args, teacher, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = teacher

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss + 0 * self.teacher(**inputs).loss.detach()


def optimizers_that_take_turns():
    """Disjoint parameters, or the same ones with a gradient each: as in plain torch."""
    model, twin = bmt.auto_wrap(Tower()), Tower()
    for either in (model, twin):
        parts = jobs.sgd(either.layers), torch.optim.RMSprop(either.head.parameters(), lr=0.01, eps=1e-3)
        whole = torch.optim.SGD(either.parameters(), lr=0.2)
        for number, optimizers in enumerate([parts, (whole,), parts]):
            either(ids(number, 0)).backward()
            for optimizer in optimizers:
                optimizer.step()
            either.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[name])


def replaced_parameter():
    model = bmt.auto_wrap(Tower())
    model.layers[1].linear.weight = torch.nn.Parameter(torch.zeros(6, 6))
    with pytest.raises(RuntimeError, match=r"'layers.1.linear.weight' is a Parameter of shape \(6, 6\) that was added"):
        model(ids(0, 0))
    with torch.no_grad():
        model.head = torch.nn.Linear(6, 2)
    with pytest.raises(RuntimeError, match=r"before auto_wrap"):
        model(ids(0, 0))


def resized_embeddings():
    for family in ("llama", "gpt2"):
        model = bmt.auto_wrap(build(family))
        with pytest.raises(RuntimeError, match="Call it before auto_wrap"):
            model.resize_token_embeddings(80)
        model(**batch(family, 0)).loss.backward()  # as it was


def retied_weights():
    model = bmt.auto_wrap(build("gpt2", tied=True))
    model.tie_weights()
    model(**batch("gpt2", 0)).loss.backward()
    assert model.lm_head.weight.buffer is model.transformer.wte.weight.buffer


def ddp():
    model = bmt.auto_wrap(Tower())
    with pytest.raises(RuntimeError, match="DistributedDataParallel was applied to a model that hf_bmtrain"):
        torch.nn.parallel.DistributedDataParallel(model)
    assert dict(torch.nn.Module.named_children(model)).keys() == {"embedding", "layers", "head"}


class Outer(torch.nn.Module):
    """Somebody's module around a wrapped model."""

    def __init__(self):
        super().__init__()
        self.inner = Whole()
        bmt.auto_wrap(self.inner)

    def forward(self, ids):
        return self.inner(ids)


class Whole(torch.nn.Module):
    """Sixteen elements: ranks' slices are of one size, so that DDP finds nothing wrong."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(16, 16))

    def forward(self, ids):
        return (self.weight * ids.float().mean()).sum()


def ddp_around_a_parent():
    """DDP reads its attribute of the outermost module only: the forward tells."""
    wrapped = torch.nn.parallel.DistributedDataParallel(Outer())
    with pytest.raises(RuntimeError, match="DistributedDataParallel was applied"):
        wrapped(ids(0, 0))


def fsdp2():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = bmt.auto_wrap(Whole())
    fully_shard(model, mesh=init_device_mesh("cpu", (bmt.world_size(),)))
    with pytest.raises(RuntimeError, match="do not apply FSDP, which replaces all parameters"):
        model(ids(0, 0))


def data_parallel():
    model = bmt.auto_wrap(Tower())
    with pytest.raises(RuntimeError, match="CUDA_VISIBLE_DEVICES=0"):
        model._replicate_for_data_parallel()  # what DataParallel does first on several GPUs


def cast():
    model = bmt.auto_wrap(Tower())
    for change in (lambda: model.to(torch.bfloat16), model.half, lambda: model.to("meta")):
        with pytest.raises(RuntimeError, match="cannot be moved or cast"):
            change()


REFUSED = [
    ({"auto_find_batch_size": True}, "wait for it forever"),
    ({"bf16_full_eval": True}, "cannot be cast"),
    ({"fp16_full_eval": True}, "cannot be cast"),
]


def refused_arguments(folder):
    for given, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            jobs.make_trainer(folder, True, given, size=bmt.world_size())
        ready = jobs.make_trainer(folder, False, given, make_optimizer=None, size=bmt.world_size())
        bmt.auto_wrap(ready.model)
        ready.add_callback(bmt.hf.BMTrainCallback())
        with pytest.raises(ValueError, match=message):
            ready.train()
    for optim in ("lomo", "adalomo", *(("galore_adamw_layerwise",) if bmt.world_size() > 1 else ())):
        with pytest.raises(ValueError, match=f"optim='{optim}' updates each weight during the backward pass"):
            jobs.make_trainer(folder, True, {"optim": optim}, size=bmt.world_size())
    given = {"enable_jit_checkpoint": True}
    if bmt.world_size() > 1:
        with pytest.raises(ValueError, match="each rank would save when it receives its own signal"):
            jobs.make_trainer(folder, True, given, size=bmt.world_size())
    model = bmt.auto_wrap(build("llama"))
    check = arguments.check_arguments
    for name, value in [("fsdp", True), ("deepspeed", "zero3.json"), ("parallelism_config", object())]:
        args = jobs.arguments(folder)
        object.__setattr__(args, name, value)
        with pytest.raises(ValueError, match=f"{name}=.*does not work with a model that hf_bmtrain has sharded"):
            check(args, model)
    args = jobs.arguments(folder)
    args._n_gpu = 2
    with pytest.raises(ValueError, match="would use DataParallel"):
        check(types.SimpleNamespace(**{**dataclasses.asdict(args), "n_gpu": 2}), model)
    args = jobs.arguments(folder)
    object.__setattr__(args, "fp16", True)
    with pytest.raises(ValueError, match="refuses float16 gradients"):
        check(args, bmt.auto_wrap(build("llama").half()))


def model_without_wrapping(folder):
    with pytest.raises(RuntimeError, match=r"0 of the \d+ parameters of LlamaForCausalLM are sharded. Call"):
        transformers.Trainer(model=build("llama"), args=jobs.arguments(folder), callbacks=[bmt.hf.BMTrainCallback()])


def accelerate_that_sees_other_ranks_or_shards_itself():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    state = Accelerator(cpu=True).state
    model = bmt.auto_wrap(Tower())
    model(ids(0, bmt.rank()))
    kept, right = dict(PartialState._shared_state), state.distributed_type
    kinds = [getattr(type(right), kind) for kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM")]
    try:
        for name, value, message in [
            ("num_processes", 7, "sees 7 process"),
            *[("distributed_type", kind, f"configured to use {kind.value}, but hf_bmtrain") for kind in kinds],
        ]:
            for shared in (PartialState._shared_state, AcceleratorState._shared_state):
                shared.update({**kept, name: value})
            with pytest.raises(RuntimeError, match=message):
                model(ids(0, 0))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def local_sgd():
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD
    from accelerate.state import AcceleratorState

    accelerator = Accelerator(cpu=True)
    try:
        model = accelerator.prepare(bmt.auto_wrap(Tower()))
        assert not hasattr(model, "no_sync")
        with pytest.raises(
            AttributeError, match="LocalSGD, .* cannot be used, because it needs all weights on each rank"
        ):
            LocalSGD(accelerator, model, local_sgd_steps=2).__enter__()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def half_weights_without_masters(folder):
    with log_lines() as warnings:
        for make_optimizer in (jobs.sgd, jobs.bmt_adam):
            model = bmt.auto_wrap(build("llama").to(torch.bfloat16))
            trainer = transformers.Trainer(
                model=model, args=jobs.arguments(folder, max_steps=1), train_dataset=jobs.Rows(),
                optimizers=(make_optimizer(model), None), callbacks=[bmt.hf.BMTrainCallback()],
            )  # fmt: skip
            trainer.train()
    assert len(warnings) == 1 and warnings[0].startswith(
        "SGD updates half-precision weights without float32 master copies"
    )


CASES = [
    optimizer_from_before, our_optimizer_from_before_beside_new_parameters,
    optimizers_that_take_turns, replaced_parameter, resized_embeddings, retied_weights, data_parallel, cast,
    accelerate_that_sees_other_ranks_or_shards_itself, local_sgd,
]  # fmt: skip
IN_A_FOLDER = [
    optimizer_from_before_in_trainer, hyperparameter_search, refused_arguments, model_without_wrapping,
    half_weights_without_masters,
]  # fmt: skip


@pytest.mark.parametrize(
    "case",
    by_default(CASES, optimizer_from_before, replaced_parameter, retied_weights, cast),
    ids=lambda case: case.__name__,
)
def test_guards(world, case):
    world(2)(case)


@pytest.mark.parametrize(
    "case", by_default(IN_A_FOLDER, refused_arguments, half_weights_without_masters), ids=lambda case: case.__name__
)
@pytest.mark.parametrize("size", SIZES)
def test_guards_of_trainer(world, size, case, tmp_path):
    world(size)(case, str(tmp_path))


@full
def test_a_trainer_without_callback(world, tmp_path):
    world(2)(trainer_without_callback, str(tmp_path))


@pytest.mark.parametrize("case", [ddp, *in_full(ddp_around_a_parent, fsdp2)], ids=lambda case: case.__name__)
def test_other_wrappers(world, case):
    world(2)(case)


@pytest.mark.parametrize("installed", ["1.13.0", *in_full("1.9.2", "0.34.0")])
def test_an_accelerate_that_would_add_ddp(monkeypatch, installed):
    monkeypatch.setattr("importlib.metadata.version", lambda name: installed)
    with pytest.raises(RuntimeError, match=f"accelerate {installed} wraps every model in DistributedDataParallel"):
        arguments.check_versions()


@full
@pytest.mark.parametrize("installed", ["1.15.0.dev0", *in_full("1.14.0", "2.0")])
def test_a_new_accelerate(monkeypatch, installed):
    monkeypatch.setattr("importlib.metadata.version", lambda name: installed)
    arguments.check_versions()
