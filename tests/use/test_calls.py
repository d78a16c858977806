"""Calls as BMTrain's scripts and ModelCenter's models make them, against plain torch in one process."""

import subprocess
import sys
from collections import OrderedDict
from dataclasses import dataclass, fields

import pytest
import torch
from torch import nn

import hf_bmtrain as bmt
from cases import by_default, full
from processes import environment
from ranks import on_ranks
from twins import WIDTH, Layer, Tower, check_gradients, check_twins, ids


def mean_losses():
    """Of any shape, with the gradients of the mean where a rank's loss is none of its own."""
    rank, size = bmt.rank(), bmt.world_size()
    rows = torch.arange(6.0).view(2, 3) + 10 * rank
    mean = torch.arange(6.0).view(2, 3) + 5 * (size - 1)
    assert torch.equal(bmt.sum_loss(rows), mean) and torch.equal(bmt.sum_loss(rows, bmt.config["comm"]), mean)
    assert bmt.sum_loss(rows.half()[0]).dtype == torch.float32
    model, twin = bmt.auto_wrap(Tower()), Tower()
    bmt.sum_loss(model(ids(0, rank))).backward()
    torch.stack([twin(ids(0, other)) for other in range(size)]).mean().backward()
    check_gradients(model, twin)
    if size > 1:
        with pytest.raises(ValueError, match=r"sum_loss needs equal shapes.*rank 1: \(2,\)"):
            bmt.sum_loss(torch.zeros(rank + 1))


def collectives_of_all_ranks():
    rank, size = bmt.rank(), bmt.world_size()
    x, comm = torch.full((size,), float(rank)), bmt.config["comm"]
    assert bmt.distributed.all_gather(x, comm).shape == (size, size)
    assert bmt.distributed.all_reduce(x, "max", comm)[0] == size - 1
    assert bmt.distributed.broadcast(x, 0, comm)[0] == 0
    assert bmt.distributed.reduce_scatter(x, "sum", comm).tolist() == [size * (size - 1) / 2]
    if size > 1:
        for name, more in [("all_gather", ()), ("all_reduce", ()), ("reduce_scatter", ()), ("broadcast", (0,))]:
            with pytest.raises(ValueError, match=rf"^{name} needs equal shapes.*rank 1: \({2 * size},\)"):
                getattr(bmt.distributed, name)(torch.zeros(size * (rank + 1)), *more)


def cross_entropies():
    """Named as in torch; the fifth positional argument is BMTrain's `parallel`."""
    logits, targets = torch.randn(4, 5), torch.tensor([1, -100, 4, 0])
    expected = nn.functional.cross_entropy(logits, targets)
    loss = bmt.loss.FusedCrossEntropy(None, -100, "mean", 0.0, False)
    torch.testing.assert_close(loss(input=logits, target=targets), expected)
    weight = nn.Parameter(torch.randn(5, 3))
    x, bias = torch.randn(2, 3), torch.randn(5)
    assert torch.equal(bmt.nn.OpLinear.apply(x, weight, bias), nn.functional.linear(x, weight, bias))


@dataclass
class Outputs(OrderedDict):
    """A dict with attributes, of a class that nobody registered."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden: tuple | None = None

    def __post_init__(self):
        for field in fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class OutputLayer(Layer):
    def forward(self, x):
        y = super().forward(x)
        return Outputs(logits=y, hidden=(x, y))


class OutputTower(Tower):
    """Its layers and itself return Outputs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([OutputLayer() for _ in range(3)])

    def forward(self, ids):
        outputs = Outputs(logits=self.embedding(ids))
        for layer in self.layers:
            outputs = layer(outputs.logits)
            assert type(outputs) is Outputs and outputs["logits"] is outputs.logits
        return Outputs(loss=self.head(outputs.hidden[1]).square().mean(), logits=outputs.logits)


def dict_outputs():
    def loss(model, step, rank):
        outputs = model(ids(step, rank))
        assert type(outputs) is Outputs and list(outputs) == ["loss", "logits"] and outputs.hidden is None
        return outputs.loss + outputs["logits"].square().mean()

    check_twins(OutputTower, loss)


class Piped(nn.Module):
    """Layers of either kind of list."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.layers = kind([Layer() for _ in range(3)])
        self.plain = kind is nn.ModuleList

    def forward(self, x):
        if self.plain:
            for layer in self.layers:
                x = layer(x)
            return x
        return self.layers(x, batch_related=[0])


def pipelines_of_one_stage():
    model, twin = Piped(bmt.PipelineTransformerBlockList), Piped(nn.ModuleList)
    assert isinstance(model.layers, bmt.TransformerBlockList)
    x = [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(r)) for r in range(bmt.world_size())]
    mine = model(x[bmt.rank()])
    torch.testing.assert_close(mine, twin(x[bmt.rank()]))
    mine.square().mean().backward()
    torch.stack([twin(each).square().mean() for each in x]).mean().backward()
    check_gradients(model, twin)
    out, hidden = model.layers(x[0], return_hidden_states=True)
    assert hidden.shape == (3, 4, WIDTH) and out.shape == (4, WIDTH)
    bmt.Block(nn.Linear(2, 2), mode="PIPE")


class OwnStateDict(nn.Module):
    """As a model of ModelCenter's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = bmt.nn.Linear(3, 2)
        self.layers = bmt.TransformerBlockList([bmt.CheckpointBlock(bmt.nn.Linear(2, 2)) for _ in range(2)])
        self.register_buffer("count", torch.tensor(7))

    def state_dict(self, destination=None, prefix="", keep_vars=False):
        return bmt.store._save_to_rank0(self, destination, prefix)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = OwnStateDict()
        self.norm = nn.LayerNorm(2)


CASES = [mean_losses, collectives_of_all_ranks, cross_entropies, dict_outputs, pipelines_of_one_stage]


@pytest.mark.parametrize("case", by_default(CASES, cross_entropies, dict_outputs), ids=lambda case: case.__name__)
def test_calls(world, case):
    world(2)(case)


@on_ranks(2, full=(1,))
def test_state_dicts(folder):
    model = Outer()
    bmt.init_parameters(model)
    full_params = {name: p.gather() for name, p in model.inner.named_parameters()}
    own = model.inner.state_dict()
    if bmt.rank() == 0:
        assert set(own) == {*full_params, "count"} and own["count"] == 7
        assert all(
            torch.equal(own[name], value) and type(own[name]) is torch.Tensor for name, value in full_params.items()
        )
    else:
        assert not own
    for state in (model.state_dict(), bmt.store.DistributedStateDictWrapper(own)):
        prefix = "inner." if "norm.bias" in state else ""
        assert all(torch.equal(state[prefix + name], value) for name, value in full_params.items())
    file = f"{folder}/model.pt"
    bmt.save(model, file)
    assert set(torch.load(file)) == {*(f"inner.{name}" for name in (*full_params, "count")), "norm.weight", "norm.bias"}
    other = Outer()
    bmt.load(other, file)
    third = OwnStateDict()
    third.load_state_dict(bmt.store.DistributedStateDictWrapper(own if bmt.rank() == 0 else {}))
    wrapped = bmt.BMTrainModelWrapper(Outer())
    bmt.load(wrapped, file)
    for loaded in (other.inner, third, wrapped.inner):
        assert all(torch.equal(p.gather(), full_params[name]) for name, p in loaded.named_parameters())
    bmt.save(wrapped, file)
    assert torch.equal(torch.load(file)["inner.layers.1.weight"], full_params["layers.1.weight"])
    assert bmt.store.allgather_objects({"rank": bmt.rank()})[-1] == {"rank": bmt.world_size() - 1}


@full
def test_init_method(tmp_path):
    """Ranks that meet in a file, without the launcher's address; the other arguments of BMTrain's."""
    code = (
        "import hf_bmtrain as bmt\n"
        f"bmt.init_distributed(init_method='file://{tmp_path}/meet', seed=1, pipe_size=1, num_micro_batches=2)\n"
        "assert bmt.store.allgather_objects(bmt.rank()) == [0, 1]\n"
        "import torch\n"
        "model = bmt.auto_wrap(torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in 'ab'}))\n"
        "model['a'](torch.ones(2, 4)).sum().backward()\n"
        "assert model['a'].weight.grad is not None and model['b'].weight.grad is None\n"
    )
    processes = []
    for rank in "01":
        env = environment(RANK=rank, WORLD_SIZE="2", LOCAL_RANK=rank, ACCELERATE_USE_CPU="true")
        processes.append(subprocess.Popen([sys.executable, "-c", code], env=env))
    assert [process.wait(timeout=120) for process in processes] == [0, 0]


@full
def test_helpers():
    assert [bmt.utils.round_up(x, 4) for x in (0, 1, 4, 5)] == [0, 4, 4, 8]
    assert bmt.utils.check_torch_version("1.12.0") > 0 > bmt.utils.check_torch_version("99.0.0")
    assert bmt.utils.check_torch_version(torch.__version__.split("+")[0]) == 0
    minor = ".".join(torch.__version__.split(".")[:2])
    expected = bmt.utils.check_torch_version(f"{minor}.0")
    for version in (minor, f"{minor}rc1", f"{minor}.0rc1"):
        assert bmt.utils.check_torch_version(version) == expected
