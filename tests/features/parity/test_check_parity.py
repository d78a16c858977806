"""bmt.check_parity: nothing in clean models, and the block of each planted error; the state is as before."""

import copy
import random
from unittest import mock

import pytest
import torch
import transformers
from torch import nn

import hf_bmtrain as bmt
from cases import full, in_full, pairwise, rows_in_full
from hf_bmtrain.features.experts import sorted as sorted_experts
from hf_bmtrain.features.mlp import chunked
from inner import state_of
from ranks import on_ranks
from twins import WIDTH, Layer, Tower, ids
from zoo_families import FAMILIES
from zoo_models import loss_of


class Unsteady(Layer):
    """Dropout, draws of Python's, running means and a counter."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.3)
        self.calls, self.kept = 0, []
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.calls += 1
        self.kept.append(self.calls)
        y = super().forward(self.dropout(x)) * (1 + random.random()) + torch.rand(())
        self.mean = 0.9 * self.mean + y.detach().mean((0, 1))
        return self.norm(y.transpose(1, 2)).transpose(1, 2) + 0.01 * self.calls


class UnsteadyTower(Tower):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Unsteady() for _ in range(3)])


def clean_family(name, dtype, options, frozen):
    family = FAMILIES[name]
    model = family.build().to(dtype)
    if frozen:
        for parameter in list(model.parameters())[::3]:
            parameter.requires_grad_(False)
    bmt.auto_wrap(model, **options)
    parity = bmt.check_parity(model, family.inputs(bmt.rank()), loss=loss_of, verbose=False)
    assert parity.ok, str(parity)
    kinds = [each.kind for each in parity.differences]
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert kinds.count("update") == len(trained)
    assert 0 < kinds.count("gradient") <= len(trained)
    blocks = {each.block for each in parity.differences if each.kind == "output"}
    assert len(blocks) >= 2 + 1
    return str(parity)


def read_state(model):
    full_params = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = {name: None if p.grad is None else p.grad.part.clone() for name, p in model.named_parameters()}
    draws = torch.get_rng_state(), random.getstate()
    attributes = [(layer.calls, list(layer.kept), id(layer.mean)) for layer in model.layers]
    modes = [module.training for module in model.modules()], [type(module) for module in model.modules()]
    return full_params, gradients, draws, attributes, modes


def assert_same(before, after):
    for mine, theirs in zip(before[:2], after[:2]):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert value is None and theirs[name] is None or torch.equal(value, theirs[name]), name
    assert torch.equal(before[2][0], after[2][0])
    assert before[2][1] == after[2][1]
    assert before[3:] == after[3:]


def other_optimizers():
    model = bmt.auto_wrap(Tower())
    for make in (bmt.optim.AdamOptimizer, torch.optim.AdamW, torch.optim.Adagrad):
        parity = bmt.check_parity(model, ids(0, bmt.rank()), optimizer=make, verbose=False)
        assert parity.ok, str(parity)


def batches_of_other_kinds():
    """By position, and by name in a mapping that is not a dict: what tokenizers return."""
    model, rows = bmt.auto_wrap(Tower()), ids(0, bmt.rank())
    for batch in ([rows], transformers.BatchEncoding({"ids": rows})):
        parity = bmt.check_parity(model, batch, verbose=False)
        assert parity.ok, str(parity)


# -- planted errors -------------------------------------------------------------------------------------------------


def gradient_is_doubled():
    """By the reduction of one block."""
    model = bmt.auto_wrap(Tower())
    gradient = state_of(model.layers[1]).buffers[0].gradient
    receive = gradient.receive

    def doubled():
        absent = receive()
        gradient.shard.mul_(2)
        return absent

    gradient.receive = doubled
    return bmt.check_parity(model, ids(0, bmt.rank()), verbose=False)


def weight_is_stale():
    """One rank's shard is written behind the back of the version, while the block is whole."""
    model = bmt.auto_wrap(Tower())
    (buffer,) = state_of(model.layers[2]).buffers
    buffer.gather()
    buffer.wait()
    if bmt.rank() == 0:
        buffer.shard.data.add_(0.5)
    return bmt.check_parity(model, ids(0, bmt.rank()), verbose=False)


def forward_is_wrong():
    """A block's own_forward, such as a compiled one or a patch of a kernel, computes something else."""
    model = bmt.auto_wrap(Tower())
    state = state_of(model.layers[1])
    state.own_forward, state.compiled = (lambda x: Layer.forward(model.layers[1], x) * 1.001), True
    return bmt.check_parity(model, ids(0, bmt.rank()), verbose=False)


def embedding_is_stale():
    model = bmt.auto_wrap(Tower())
    buffer = model.embedding.weight.buffer
    if buffer.sharded:
        buffer.gather()
        buffer.wait()
        buffer.shard.data.add_(0.5)
    else:
        hook = model.embedding.register_forward_hook(lambda module, args, x: x * (1.1 if is_sharded(module) else 1))
        assert hook
    return bmt.check_parity(model, ids(0, bmt.rank()), verbose=False)


def is_sharded(module):
    return isinstance(module, bmt.DistributedModule)


class WrongSGD(torch.optim.SGD):
    """Forgets the slices that are not large."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if not isinstance(p, bmt.DistributedParameter) or p.shape != (2, 6):
                    p.add_(p.grad, alpha=-group["lr"])


def update_is_wrong():
    model = bmt.auto_wrap(Tower())
    make = lambda parameters: WrongSGD(parameters, lr=0.1)  # noqa: E731
    return bmt.check_parity(model, ids(0, bmt.rank()), optimizer=make, verbose=False)


def experts_are_wrong():
    """Their own forward, which the plain step replaces by transformers'."""
    run = sorted_experts.run_experts
    with mock.patch.object(sorted_experts, "run_experts", lambda *args: 1.01 * run(*args)):
        return check_family("mixtral")


def chunked_mlp_is_wrong():
    """The gradients of its weights are those of the last piece."""
    with mock.patch.object(chunked, "_added", lambda total, gradient: gradient.float()):
        return check_family("llama tied", mlp_chunks=2)


def check_family(name, **options):
    model = bmt.auto_wrap(FAMILIES[name].build(), **options)
    return bmt.check_parity(model, FAMILIES[name].inputs(bmt.rank()), loss=loss_of, verbose=False)


PLANTED = {
    gradient_is_doubled: ("gradient", "layers.1"),
    weight_is_stale: ("output", "layers.2"),
    forward_is_wrong: ("output", "layers.1"),
    embedding_is_stale: ("output", "embedding"),
    update_is_wrong: ("update", "head.weight"),
    experts_are_wrong: ("output", "model.layers.0"),
    chunked_mlp_is_wrong: ("gradient", "model.layers.1"),
}


@pytest.mark.parametrize(
    ("plant", "size"),
    [
        *((plant, 2) for plant in [gradient_is_doubled, weight_is_stale, update_is_wrong, experts_are_wrong]),
        *rows_in_full((plant, 3) for plant in PLANTED),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_planted_errors_are_named(world, plant, size):
    results = world(size)(plant)
    kind, block = PLANTED[plant]
    for parity in results:
        assert not parity.ok
        assert (parity.first.kind, parity.first.block) == (kind, block), str(parity)
        assert f"the first that differs: {kind} of {block}" in str(parity)
        assert parity == results[0]


def updates_in_backward():
    """An optimizer that updates in every backward does not in this one."""
    trained = []
    for checked in (True, False):
        model = bmt.auto_wrap(Tower())
        optimizer = bmt.optim.AdamOffloadOptimizer(model.parameters(), lr=1e-2)
        for step in range(4):
            with optimizer.update_in_backward():
                if checked:
                    assert bmt.check_parity(model, ids(9, bmt.rank()), verbose=False).ok
                model(ids(step, bmt.rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append(model.state_dict())
    for name, value in trained[0].items():
        assert torch.equal(value, trained[1][name]), name


def fused_loss_in_either_order():
    """The plain step computes the loss in pieces too, so that the head returns logits in neither."""
    heads = []
    for later in (False, True):
        model = FAMILIES["llama"].build()
        assert later or bmt.hf.fuse_causal_loss(model)
        model = bmt.auto_wrap(model)
        assert not later or bmt.hf.fuse_causal_loss(model)
        batch = {"input_ids": ids(0, bmt.rank()), "labels": ids(0, bmt.rank())}
        parity = bmt.check_parity(model, batch, verbose=False)
        assert parity.ok, str(parity)
        heads.append([type(each).__mro__ for each in (model.lm_head, copy.deepcopy(model).lm_head)])
    assert heads[0] == heads[1]


def hooks_are_counted():
    """A hook of one rank, which doubles a gradient in training, is not run, and the table says so."""
    model = bmt.auto_wrap(Tower())
    assert bmt.check_parity(model, ids(0, bmt.rank()), verbose=False).unrun_hooks == 0
    called = []
    if bmt.rank() == 0:
        model.head.weight.register_post_accumulate_grad_hook(called.append)
    parity = bmt.check_parity(model, ids(0, bmt.rank()), verbose=False)
    assert parity.ok and parity.unrun_hooks == 1 and not called
    assert str(parity).endswith("\ngradient hooks (register_post_accumulate_grad_hook) that were not run: 1")
    model(ids(0, bmt.rank())).backward()
    assert len(called) == (bmt.rank() == 0)


def bound_of_one_rank():
    model = bmt.auto_wrap(Tower())
    bound = 1e-3 if bmt.rank() else None
    with pytest.raises(RuntimeError, match="check_parity: the ranks differ.*bound: rank 0 has None, rank 1 has 0.001"):
        bmt.check_parity(model, ids(0, bmt.rank()), bound=bound, verbose=False)


def refusals():
    with pytest.raises(TypeError, match="must be a torch.nn.Module"):
        bmt.check_parity(None, ids(0, 0))
    with pytest.raises(TypeError, match="optimizer must be a function"):
        bmt.check_parity(Tower(), ids(0, 0), optimizer=torch.optim.SGD(Tower().parameters(), lr=0.1))
    with pytest.raises(ValueError, match="bound must be 0 or more"):
        bmt.check_parity(Tower(), ids(0, 0), bound=float("nan"))
    with pytest.raises(ValueError, match="wrapped model"):
        bmt.check_parity(Tower(), ids(0, 0))
    model = bmt.auto_wrap(Tower())
    with (
        mock.patch("hf_bmtrain.features.parity.check_parity.available_bytes", return_value=1500),
        pytest.raises(RuntimeError, match="weights and gradients need .* GiB, but only .* are left"),
    ):
        bmt.check_parity(model, ids(0, 0))
    assert bmt.check_parity(model, ids(0, bmt.rank()), verbose=False).ok


AS_IT_IS, KEPT_AND_FROZEN = ({}, False), ({"zero_level": 2, "use_checkpoint": False}, True)


@pytest.mark.parametrize(
    ("size", "name", "dtype", "case"),
    pairwise(
        [(2, "llama tied", torch.bfloat16, AS_IT_IS), (3, "t5", torch.float32, KEPT_AND_FROZEN)],
        [1, 2, 3],
        ["llama tied", "gpt2", "bert", "t5", "mixtral"],
        [torch.float32, torch.bfloat16],
        [AS_IT_IS, KEPT_AND_FROZEN],
    ),
    ids=str,
)
def test_clean_families(world, size, name, dtype, case):
    table = world(size)(clean_family, name, dtype, *case)[0]
    assert "the sharded and the plain step agree" in table


@full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@on_ranks(2, full=(1,))
def test_state_is_kept(dtype):
    """In the middle of an accumulation, in half precision; the training after it is the one without it."""
    trained = []
    for checked in (True, False):
        model = UnsteadyTower().to(dtype)
        bmt.auto_wrap(model)
        model.layers[1].eval()
        hooked = []
        model.head.weight.register_post_accumulate_grad_hook(hooked.append)
        optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2)
        torch.manual_seed(bmt.rank())
        random.seed(bmt.rank())
        if checked:
            bmt.check_parity(model, ids(99, bmt.rank()), verbose=False)
            assert not any(p.trained for p in model.parameters())
        for step in range(6):
            model(ids(step, bmt.rank())).backward()
            if checked:
                before = read_state(model)
                parity = bmt.check_parity(model, (ids(99, bmt.rank()),), verbose=False)
                assert parity.ok, str(parity)
                with pytest.raises(ZeroDivisionError):
                    bmt.check_parity(model, ids(98, bmt.rank()), loss=lambda outputs: 1 / 0)
                with pytest.raises(ValueError, match="a tensor with one element"):
                    bmt.check_parity(model, ids(98, bmt.rank()), loss=lambda outputs: None)
                assert_same(before, read_state(model))
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        assert len(hooked) == 6
        trained.append(model.state_dict())
    for name, value in trained[0].items():
        assert torch.equal(value, trained[1][name]), name


@on_ranks(1)
def test_gradients_of_unsharded_parameters_are_kept():
    """As in scripts of BMTrain, in which only the blocks are sharded. Nor are their hooks called."""
    model = nn.Sequential(bmt.CheckpointBlock(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 1))
    x = torch.randn(4, WIDTH)
    model(x).square().mean().backward()
    before, hooked = [parameter.grad.clone() for parameter in model.parameters()], []
    model[1].bias.register_post_accumulate_grad_hook(hooked.append)
    parity = bmt.check_parity(model, x, loss=lambda outputs: outputs.square().mean(), verbose=False)
    assert parity.ok
    assert parity.unrun_hooks == 1
    assert not hooked
    for parameter, gradient in zip(model.parameters(), before):
        assert torch.equal(parameter.grad, gradient)
    model(x).square().mean().backward()
    assert len(hooked) == 1


@pytest.mark.parametrize("size", [2, *in_full(1)])
@pytest.mark.parametrize(
    "function",
    [
        other_optimizers, batches_of_other_kinds, updates_in_backward, fused_loss_in_either_order, hooks_are_counted,
        refusals,
    ],
)  # fmt: skip
def test_check_parity(world, size, function):
    world(size)(function)


def test_different_bounds(world):
    world(2)(bound_of_one_rank)


class HandLayer(bmt.DistributedModule):
    """Written for BMTrain: it has no class of its own without the library's."""

    def __init__(self):
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.eye(WIDTH) + 0.1)

    def forward(self, x):
        return torch.tanh(nn.functional.linear(x, self.weight))


class HandModel(bmt.DistributedModule):
    def __init__(self):
        super().__init__()
        self.first = HandLayer()
        self.blocks = bmt.TransformerBlockList([HandLayer(), HandLayer()])

    def forward(self, x):
        return self.blocks(self.first(x)).square().mean()


def hand_written():
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(bmt.rank()))
    model = HandModel()
    assert bmt.check_parity(model, x, verbose=False).ok
    gradient = state_of(model.blocks[1]).buffers[0].gradient
    receive = gradient.receive
    gradient.receive = lambda: (receive(), gradient.shard.mul_(2))[0]
    parity = bmt.check_parity(model, x, verbose=False)
    assert (parity.first.kind, parity.first.block) == ("gradient", "blocks.1.weight"), str(parity)


def compiled_blocks():
    """The plain step runs them eagerly; the wholes that were compiled for are not replaced."""
    model = bmt.auto_wrap(Tower(), compile="aot_eager")
    for step in range(2):
        model(ids(step, bmt.rank())).backward()
        parity = bmt.check_parity(model, ids(0, bmt.rank()), verbose=False)
        assert parity.ok, str(parity)


def patched_forward():
    """A forward that was set on a layer's instance before wrapping is the model's own."""
    model = Tower()
    for layer in model.layers:
        layer.forward = lambda x, layer=layer: 2 * Layer.forward(layer, x)
    bmt.auto_wrap(model)
    before = [dict(vars(layer)) for layer in model.layers]
    assert bmt.check_parity(model, ids(0, bmt.rank()), verbose=False).ok
    assert [dict(vars(layer)) for layer in model.layers] == before


@pytest.mark.parametrize("size", [2, *in_full(1)])
@pytest.mark.parametrize("function", [hand_written, *in_full(compiled_blocks, patched_forward)])
def test_other_models(world, size, function):
    world(size)(function)


def test_copies_between_ranks(peers):
    """Weights that are pulled from the other ranks' memory, and gradients that are pushed into it."""
    name, dtype, options, frozen = "llama tied", torch.float32, {}, False
    peers(2)(clean_family, name, dtype, options, frozen)
    kind, block = PLANTED[gradient_is_doubled]
    for parity in peers(2)(gradient_is_doubled):
        assert (parity.first.kind, parity.first.block) == (kind, block), str(parity)
