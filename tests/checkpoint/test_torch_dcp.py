"""bmt.DCPState: checkpoints of torch.distributed.checkpoint, to and from FSDP2 and plain models, bit by bit."""

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import hf_bmtrain as bmt
from cases import by_default, full, in_full, rows_in_full
from hf_bmtrain.checkpoint.small_state import encode
from hf_bmtrain.checkpoint.torch_dcp import _pack, boxes
from hf_bmtrain.engine.optim import compat
from ranks import on_ranks
from resumable import Training
from state_dicts import check_equal

LACKS = not hasattr(dcp, "CheckpointableTensor")
needs_protocol = pytest.mark.skipif(LACKS, reason="torch.distributed.checkpoint.CheckpointableTensor needs torch 2.15")


@full
@pytest.mark.parametrize("shape", [(2, 3, 4), *in_full((), (1,), (7,), (3, 4), (5, 1), (1, 6), (3, 1, 2, 2))], ids=str)
def test_boxes(shape):
    """Each range is covered, every element once, in order, by few boxes."""
    numbers = torch.arange(max(1, torch.Size(shape).numel())).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(numbers.numel() + 1), 2):
        found = list(boxes(shape, start, stop))
        cut = [numbers[tuple(slice(o, o + s) for o, s in zip(*box))].reshape(-1) for box in found]
        assert torch.equal(torch.cat([torch.empty(0, dtype=torch.long), *cut]), torch.arange(start, stop))
        assert len(found) <= max(1, 2 * len(shape) - 1)


@full
@pytest.mark.skipif(not LACKS, reason="this torch has the protocol")
def test_older_torch():
    with pytest.raises(RuntimeError, match=r"which torch 2\.15 introduces, but this is torch .*bmt\.save_state"):
        bmt.DCPState(nn.Linear(2, 2))


@on_ranks(1)
def test_groups_are_those_that_were_saved():
    def state(*groups):
        model = bmt.auto_wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        parameters = dict(model.named_parameters())
        given = [{"params": [parameters[name] for name in names], "lr": lr} for lr, names in groups]
        optimizer = torch.optim.SGD(given, momentum=0.9)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        return bmt.DCPState(model, optimizer)

    with mock.patch.object(dcp, "CheckpointableTensor", torch.Tensor, create=True):  # no tensor is looked into
        saved = state((0.1, ["0.weight", "1.weight"]), (0.2, ["0.bias", "1.bias"])).state_dict()
        with pytest.raises(
            ValueError,
            match=r"groups have 2, 2 parameters, and those of this optimizer have 1, 3\. .* in group 0, 1 ",
        ):
            state((0.1, ["0.weight"]), (0.2, ["1.weight", "0.bias", "1.bias"])).load_state_dict(saved)
        with pytest.raises(
            ValueError,
            match=r"groups have 2, 2 parameters, and those of this optimizer have 4\. .* in group 0, 1 ",
        ):
            state((0.1, ["0.weight", "1.weight", "0.bias", "1.bias"])).load_state_dict(saved)


@pytest.mark.parametrize("steps", [0, *in_full(2)])
@on_ranks(1)
def test_optimizers_without_state(folder, steps):
    """SGD without momentum never has state; with momentum, it has none where no parameter had a gradient."""

    def state(momentum, lr, steps):
        model = bmt.auto_wrap(nn.Sequential(nn.Linear(4, 4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
        for _ in range(steps):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        return bmt.DCPState(model, optimizer), model, optimizer

    with mock.patch.object(dcp, "CheckpointableTensor", torch.Tensor, create=True):
        saved, model, _ = state(0, 0.5, steps)
        dcp.save({"app": saved}, checkpoint_id=folder)
        other, loaded, optimizer = state(0, 0.1, 0)
        dcp.load({"app": other}, checkpoint_id=folder)
        check_equal(loaded.state_dict(), model.state_dict())
        assert optimizer.param_groups[0]["lr"] == 0.5
        other, _, optimizer = state(0.9, 0.1, 0)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="SGD has no state before its first step"):
                other.state_dict()
            optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, *in_full(bmt.optim.AdamOptimizer)])
@on_ranks(2, full=(1, 3))
def test_rank_0_saves_what_get_state_dict_returns(folder, kind):
    """torch's recipe for a full checkpoint, which sharded and, with torch's optimizers, plain models can load."""

    def make(seed, kind, wrap):
        torch.manual_seed(seed)
        model = wrap(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)))
        return model, kind(model.parameters(), lr=0.1)

    def step(model, optimizer):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = make(0, kind, bmt.auto_wrap)
    step(model, optimizer)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    if bmt.rank() == 0:
        torch.save([weights, state], f"{folder}/full.pt")
    bmt.synchronize()
    step(model, optimizer)
    expected = model.state_dict()
    plain = [lambda model: model] if kind is torch.optim.AdamW else []  # AdamOptimizer has other options
    for wrap in [bmt.auto_wrap, *plain]:
        loaded, other = make(1, kind, wrap)
        weights, state = torch.load(f"{folder}/full.pt", weights_only=False)
        set_state_dict(
            loaded,
            other,
            model_state_dict=weights,
            optim_state_dict=state,
            options=StateDictOptions(full_state_dict=True),
        )
        step(loaded, other)
        torch.testing.assert_close(dict(loaded.state_dict()), dict(expected))


@on_ranks(1)
def test_an_optimizer_that_cannot_be_tried_counts_as_one_with_state():
    """An error is safer than a checkpoint that lacks state, and the log says why."""

    class Once(torch.optim.SGD):
        def __init__(self, parameters):
            super().__init__(parameters, lr=0.1)
            if getattr(Once, "exists", False):
                raise ValueError("there can be only one")
            Once.exists = True

    model = bmt.auto_wrap(nn.Sequential(nn.Linear(4, 4)))
    optimizer = Once(model.parameters())
    with mock.patch.object(compat._log, "warning") as warning:
        assert compat.keeps_state(optimizer)
    message, name, error = warning.call_args.args
    assert "is assumed to keep state" in message and name == "Once" and "there can be only one" in str(error)


class Counting(torch.optim.AdamW):
    """Its state_dict() has an entry of its own."""

    own: Any = 0

    def state_dict(self):
        return {**super().state_dict(), "own": self.own}

    def load_state_dict(self, state_dict):
        left = dict(state_dict)
        self.own = left.pop("own")
        super().load_state_dict(left)


class Wrapper:
    """It is no torch optimizer, and adds an entry."""

    def __init__(self, optimizer):
        self.optimizer, self.own = optimizer, 0

    param_groups = property(lambda self: self.optimizer.param_groups)

    def state_dict(self):
        return {**self.optimizer.state_dict(), "own": self.own}

    def load_state_dict(self, state_dict):
        self.own = state_dict["own"]
        self.optimizer.load_state_dict({name: value for name, value in state_dict.items() if name != "own"})


ADDING = {
    "subclass": Counting,
    "around adamw": lambda parameters: Wrapper(torch.optim.AdamW(parameters)),
    "around ours": lambda parameters: Wrapper(bmt.optim.AdamOptimizer(parameters)),
}


def with_entry(kind, own):
    """The DCPState of a model after a step, and its optimizer, whose entry is `own`."""
    model = bmt.auto_wrap(nn.Sequential(nn.Linear(16, 16)))
    optimizer = ADDING[kind](model.parameters())
    inner = getattr(optimizer, "optimizer", optimizer)
    model(torch.ones(2, 16)).sum().backward()
    inner.step()
    optimizer.own = own
    return bmt.DCPState(model, optimizer), optimizer, inner.state[model[0].weight]


@pytest.mark.parametrize("kind", ADDING)
@on_ranks(2, full=(1,))
def test_entries_that_an_optimizer_adds(kind):
    """Each rank's own are loaded, on other numbers of ranks those of rank 0."""
    with mock.patch.object(dcp, "CheckpointableTensor", torch.Tensor, create=True):
        state, optimizer, moments = with_entry(kind, {"of": [torch.tensor([bmt.rank()])]})
        moments["exp_avg"].fill_(3.0)
        saved = state.state_dict()
        other, its, _ = with_entry(kind, 0)
        other.load_state_dict(saved)
        assert its.own == {"of": [torch.tensor([bmt.rank()])]}
        moment = its.state_dict()["state"][0]["exp_avg"]
        assert set(getattr(moment, "part", moment).tolist()) == {3.0}
        saved["optim"]["added_entries"] = encode([encode({"own": rank}) for rank in range(7, 14)])
        other.load_state_dict(saved)
        assert its.own == 7
        optimizer.own = {"of": Wrapper(None)}
        with pytest.raises(RuntimeError, match=r"an object of type Wrapper at \['own'\]\['of'\]"):
            state.state_dict()
        optimizer.own = {"of": moments["exp_avg"]}
        if bmt.world_size() > 1 and kind != "around ours":
            with pytest.raises(RuntimeError, match="sharded tensors in the entry 'own'"):
                state.state_dict()


def test_added_entries_in_files(tmp_path):
    """DCP writes them as one object, so a dict or a tensor in them may have another size when they are loaded."""
    written = {"optim": {"added_entries": encode([encode({"own": torch.ones(3)})])}}
    dcp.save({"app": written}, checkpoint_id=tmp_path)
    present = {"app": {"optim": {"added_entries": encode([encode({})])}}}
    dcp.load(present, checkpoint_id=tmp_path)
    assert present["app"] == written


@on_ranks(2)
def test_moments_of_an_empty_parameter_keep_their_dtype():
    model = bmt.auto_wrap(nn.Sequential(nn.Linear(0, 4, dtype=torch.bfloat16)))
    moments = _pack(model[0].weight, torch.empty(0, dtype=torch.float32))
    assert (moments.shape, moments.dtype) == ((4, 0), torch.float32)


class Model(nn.Module):
    """A scalar, a three-dimensional and an empty parameter, odd sizes, tied weights, a buffer and a frozen layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 5)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.Linear(9, 5)) for _ in range(3))
        self.experts = nn.Parameter(torch.randn(3, 5, 5))
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.arange(3.0))
        self.layers[1][0].requires_grad_(False)

    def forward(self, ids):
        x = self.embedding(ids)
        for number, layer in enumerate(self.layers):
            x = x + layer(x) @ self.experts[number]
        return (x @ self.embedding.weight.T * self.scale).square().mean()


def rows(step):
    """The same on every rank: nobody averages the gradients of a plain model, or of a scalar in FSDP2's."""
    return torch.randint(0, 11, (2, 4), generator=torch.Generator().manual_seed(step))


def trained(model, optimizer, steps=2):
    for step in range(steps):
        model(rows(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def ours(kind, steps):
    model = bmt.auto_wrap(Model())
    return trained(model, KINDS[kind]([p for p in model.parameters() if p.requires_grad], lr=0.02), steps)


def by_torch(sharded, steps, lr=0.01):
    model = Model()
    if sharded:
        from torch.distributed.fsdp import fully_shard

        mesh = torch.distributed.init_device_mesh("cpu", (bmt.world_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh, ignored_params={model.scale})  # it does not shard scalars
    return trained(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr), steps)


KINDS = {"adam": bmt.optim.AdamOptimizer, "adamw": torch.optim.AdamW, "offload": bmt.optim.AdamOffloadOptimizer}


def whole_of_ours(model, optimizer):
    """Weights, buffers and moments by name. Collective."""
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    states = manager.state_dict(gather_opt=True)["optimizers"][0]["state"]
    moments = {f"{names[i]}.{key}": torch.as_tensor(v) for i, values in states.items() for key, v in values.items()}
    weights = model.state_dict()
    return {**weights, **moments} if bmt.rank() == 0 else {}


def whole_of_torch(model, optimizer):
    """The same of a plain model or FSDP2's. Collective."""
    weights, state = get_state_dict(model, optimizer)
    moments = {f"{name}.{key}": v for name, values in state["state"].items() for key, v in values.items()}
    return {name: v.full_tensor() if hasattr(v, "full_tensor") else v for name, v in {**weights, **moments}.items()}


def check(mine, theirs):
    if mine:
        assert sorted(mine) == sorted(theirs)
    for name, value in mine.items():
        assert torch.equal(value.detach(), theirs[name].detach()), name


@needs_protocol
@pytest.mark.parametrize("sharded", [True, *in_full(False)])
@pytest.mark.parametrize("kind", by_default(KINDS, "adam"))
@on_ranks(2, full=(3,))
def test_to_torch(folder, kind, sharded):
    model, optimizer = ours(kind, 2)
    dcp.save({"app": bmt.DCPState(model, optimizer)}, checkpoint_id=folder)
    other, its = by_torch(sharded, 1)
    weights, state = get_state_dict(other, its)
    loaded = {"app": {"model": weights, "optim": state}}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(other, its, model_state_dict=weights, optim_state_dict=state)
    check(whole_of_ours(model, optimizer), whole_of_torch(other, its))
    assert its.param_groups[0]["lr"] == 0.02


@needs_protocol
@pytest.mark.parametrize("sharded", [True, *in_full(False)])
@pytest.mark.parametrize(("kind", "steps"), [("adamw", 1), *rows_in_full([("adam", 0), ("adam", 1), ("offload", 0)])])
@on_ranks(2, full=(3,))
def test_from_torch(folder, kind, sharded, steps):
    model, optimizer = by_torch(sharded, 2)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"app": {"model": weights, "optim": state}}, checkpoint_id=folder)
    mine, its = ours(kind, steps)
    dcp.load({"app": bmt.DCPState(mine, its)}, checkpoint_id=folder)
    check(whole_of_ours(mine, its), whole_of_torch(model, optimizer))
    assert its.param_groups[0]["lr"] == 0.01
    trained(mine, its, 1)  # what was loaded is what trains
    trained(model, optimizer, 1)
    after, expected = whole_of_ours(mine, its), whole_of_torch(model, optimizer)
    for name, value in after.items():
        torch.testing.assert_close(value.detach(), expected[name].detach())


def save_ours(folder, case):
    training = Training(**case)
    training.train(2)
    dcp.save({"app": bmt.DCPState(training.model, training.optimizer)}, checkpoint_id=folder)
    return training.whole()


def load_ours(folder, case):
    training = Training(**case, seed=1)
    dcp.load({"app": bmt.DCPState(training.model, training.optimizer)}, checkpoint_id=folder)
    return training.whole()


@needs_protocol
@pytest.mark.parametrize(
    "case", [{"family": "t5", "tied": True}, {"family": "gpt2", "dtype": torch.bfloat16, "frozen": True}], ids=str
)
def test_from_ours(world, tmp_path, case):
    """Tied weights, masters of half-precision weights, another number of ranks."""
    saved = world(2)(save_ours, str(tmp_path), case)[0]
    check_equal(world(3)(load_ours, str(tmp_path), case)[0], saved)


@needs_protocol
@on_ranks(2)
def test_before_the_first_step():
    model = bmt.auto_wrap(Model())
    state = bmt.DCPState(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(RuntimeError, match="AdamW has no state before its first step"):
        state.state_dict()
