"""The small names: config, groups, nn.Linear, utils, and what is not supported."""

import io
import subprocess
import sys

import pytest
import torch
from torch import nn

import hf_bmtrain as bmt
from cases import by_default, full, in_full
from twins import Tower


def config():
    world = bmt.current_world()
    assert bmt.config["rank"] == bmt.rank() == world.rank
    assert bmt.config["world_size"] == bmt.world_size()
    assert bmt.config["zero_level"] == 3
    assert bmt.config["pipe_size"] == bmt.config["tp_size"] == 1
    assert bmt.config["initialized"] is True
    assert bmt.config["loss_scale_steps"] == 1024
    assert {"rank", "local_rank", "world_size"} <= set(bmt.config) == set(dict(bmt.config))
    assert len(bmt.config) == len(list(bmt.config)) and "tp_comm" not in bmt.config
    assert bmt.config["topology"].tp_id == bmt.config["topology"].get_group_rank("tp") == 0
    assert bmt.config["tp_zero_size"] == bmt.config["zero_size"] == bmt.world_size()
    assert bmt.config["load_stream"] == bmt.config["calc_stream"]
    with pytest.raises(KeyError, match="world_size"):
        bmt.config["tp_comm"]
    with pytest.raises(TypeError, match="read-only"):
        bmt.config["zero_level"] = 2


class Grouped(bmt.DistributedModule):
    def __init__(self):
        super().__init__()
        self.plain = bmt.DistributedParameter(torch.ones(3))
        self.adapter = bmt.DistributedParameter(torch.ones(4), group="adapter")
        self.tied = self.adapter
        self.block = bmt.CheckpointBlock(GroupedLayer())


class GroupedLayer(bmt.DistributedModule):
    def __init__(self):
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.ones(2, 2))
        self.adapter = bmt.DistributedParameter(torch.ones(2), group="adapter")


def groups():
    model = Grouped()
    found = dict(bmt.grouped_parameters(model))
    shapes = {group: [tuple(p.full_shape) for p in parameters] for group, parameters in found.items()}
    assert shapes == {None: [(3,), (2, 2)], "adapter": [(4,), (2,)]}
    torch.optim.SGD([{"params": p, "lr": 0.1 if group else 0.2} for group, p in bmt.grouped_parameters(model)])


def linear():
    layer = bmt.nn.Linear(3, 5)
    bmt.init_parameters(layer)
    weight, bias = layer.weight.gather(), layer.bias.gather()
    assert weight.shape == (5, 3) and 0.1 < weight.std() < 1.2 and not bias.any()
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(bmt.rank()))
    torch.testing.assert_close(layer(x), nn.functional.linear(x, weight, bias))
    assert bmt.nn.Linear(3, 5, bias=False, dtype=torch.half).bias is None
    assert bmt.nn.Linear(3, 5, dtype=torch.half).weight.dtype == torch.half
    with pytest.raises(ValueError, match="at least 1 and below"):
        bmt.nn.Linear(0, 5)


def whole_parameter():
    model, twin = bmt.auto_wrap(Tower()), Tower()
    for ours, plain in zip(model.parameters(), twin.parameters()):
        assert torch.equal(ours.gather(), plain)


def not_offered():
    with pytest.raises(NotImplementedError, match="To use all ranks, leave comm out"):
        bmt.sum_loss(torch.ones(()), comm="pipe")


def waiting():
    bmt.wait_loader()
    bmt.synchronize()


CASES = [config, groups, linear, whole_parameter, not_offered, waiting]


@pytest.mark.parametrize("case", by_default(CASES, groups, not_offered), ids=lambda case: case.__name__)
def test_surface(world, case):
    world(2)(case)


@full
def test_before_init():
    """In a process of its own: nothing is initialised there, and the refused sizes leave it so."""
    code = (
        "import hf_bmtrain as bmt, pytest\n"
        "assert bmt.config['initialized'] is False and 'before' in repr(bmt.config)\n"
        "with pytest.raises(NotImplementedError, match='is not supported'): bmt.init_distributed(pipe_size=2)\n"
        "with pytest.raises(ValueError, match='the number of ranks, which is 1'): bmt.init_distributed(tp_size=4)\n"
        "with pytest.raises(RuntimeError, match='init_distributed'): bmt.config['device']\n"
        "assert [bmt.config[key] for key in ('rank', 'local_rank', 'world_size')] == [0, 0, 1]\n"
        "assert (bmt.rank(), bmt.world_size()) == (0, 1)\n"
        "bmt.print_rank('printed')\n"
        "bmt.print_rank('not printed', rank=1)\n"
        "bmt.init_distributed(seed=0, pipe_size=-1, tp_size=1)\n"
        "assert bmt.config['world_size'] == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert [line for line in done.stdout.splitlines() if "printed" in line] == ["printed"]


@full
def test_average_recorder():
    """Against the weighted mean that the docstring writes."""
    average, values = bmt.utils.AverageRecorder(alpha=0.8), [3.0, -1.0, 4.0, 1.5]
    assert average.value == 0
    for count, value in enumerate(values, 1):
        average.record(value)
        weights = [0.8 ** (count - number) for number in range(1, count + 1)]
        expected = sum(w * v for w, v in zip(weights, values)) / sum(weights)
        assert average.value == pytest.approx(expected)
    assert bmt.utils.AverageRecorder(start_value=2.5).value == 2.5
    with pytest.raises(ValueError, match="alpha"):
        bmt.utils.AverageRecorder(alpha=1.0)


@full
def test_printing():
    out = io.StringIO()
    bmt.print_block("sizes", "here", file=out)
    title, content = out.getvalue().splitlines()
    assert len(title) == 60 and title.strip("=") == " sizes " and content == "here"
    out = io.StringIO()
    long = "word " * 40
    bmt.print_dict("options", {"lr": 0.1, "a longer name": long, "empty": ""}, file=out)
    lines = out.getvalue().splitlines()
    assert {line.index(":") for line in lines[1:] if ":" in line} == {len("a longer name") + 1}
    assert all(len(line) <= 60 for line in lines)
    assert "".join(out.getvalue().split()).count("word") == 40
    bmt.print_dict("nothing", {}, file=out)


def seen_memory():
    if bmt.rank() != 0:
        return None
    from contextlib import redirect_stdout

    out = io.StringIO()
    with redirect_stdout(out):
        bmt.see_memory("before")
    return out.getvalue()


@full
@pytest.mark.parametrize("size", [2, *in_full(1)])
def test_see_memory(world, size):
    text = world(size)(seen_memory)[0]
    assert text.startswith("before: ")
    assert 0.05 < float(text.split("resident ")[1].split()[0]) < 50
