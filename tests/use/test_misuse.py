"""What users do wrong: each is one clear error that names the way out, on one rank and on two, and never a hang."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import hf_bmtrain as bmt
from cases import by_default, full
from ranks import Ranks
from tiny_models import build
from twins import Tower, ids

# -- before there is a world: in a fresh process -----------------------------------------------------------------

UNINITIALISED = [
    "bmt.synchronize()", "bmt.auto_wrap(torch.nn.Linear(2, 2))", "bmt.DistributedParameter(torch.ones(2))",
    "bmt.optim.OptimManager()", "bmt.save(torch.nn.Linear(2, 2), 'x.pt')", "bmt.config['device']",
]  # fmt: skip
LAUNCHES = {
    "MASTER_ADDR": ({"RANK": "0", "WORLD_SIZE": "2"}, "Start the script with torchrun"),
    "rank too large": ({"RANK": "2", "WORLD_SIZE": "2"}, "does not fit WORLD_SIZE"),
    "not a number": ({"RANK": "zero", "WORLD_SIZE": "1"}, "must be integers"),
}


def in_one_process(code):
    """Runs the lines of `code` in a new process, which must come to their end. None of them makes a world."""
    variables = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-c", f"import os, torch, hf_bmtrain as bmt\n{code}print('done')"],
        env=variables | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.stdout.endswith("done\n"), done.stderr


def refused(call, message):
    """Lines that make a call, and end the process if the message is not in its error."""
    return (
        f"try:\n    {call}\nexcept (RuntimeError, ValueError) as error: assert {message!r} in str(error), error\n"
        f"else: raise SystemExit({call!r})\n"
    )


def test_before_init_distributed():
    in_one_process("".join(refused(call, "Call hf_bmtrain.init_distributed() first") for call in UNINITIALISED))


@full
def test_launched_wrongly():
    code = "".join(
        f"os.environ.update({variables})\n" + refused("bmt.init_distributed()", message)
        for variables, message in LAUNCHES.values()
    )
    in_one_process(code)


# -- in a world ----------------------------------------------------------------------------------------------------


def wrapped(make=Tower):
    return bmt.auto_wrap(make())


def state(**changes):
    return {**Tower().state_dict(), **changes}


def manager_of(model):
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    return manager


def stepped_between():
    model = wrapped()
    loss = model(ids(0, 0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    loss.backward()


def optimizer_before_wrapping():
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bmt.auto_wrap(model)
    bmt.optim.OptimManager().add_optimizer(optimizer)


def write_in_gathered():
    model = wrapped()
    with bmt.gathered(model):
        model.head.weight.zero_()


def resized_in_gathered():
    model = wrapped(lambda: build("gpt2"))
    with bmt.gathered(model, modify=True):
        type(model).resize_token_embeddings(model, 99)


def two_inspectors():
    with bmt.inspect.inspect_tensor(), bmt.inspect.inspect_tensor():
        pass


def pickled_module(folder):
    path = f"{folder}/module.pt"
    if bmt.rank() == 0:
        torch.save(nn.Linear(2, 2), path)
    bmt.synchronize()
    bmt.load(wrapped(), path)


def meta():
    with torch.device("meta"):
        return nn.Linear(2, 2)


MISUSES = {
    "initialised twice": (lambda: bmt.init_distributed(), RuntimeError, "Call it once"),
    "zero_level 1": (lambda: bmt.auto_wrap(Tower(), zero_level=1), ValueError, "must be 2"),
    "block of zero_level 4": (lambda: bmt.Block(nn.Linear(2, 2), zero_level=4), ValueError, "must be 2"),
    "meta parameter": (lambda: bmt.DistributedParameter(torch.empty(2, device="meta")), ValueError, "init_method="),
    "meta model": (lambda: bmt.auto_wrap(meta()), ValueError, "Load or initialize the model on the CPU"),
    "scripted module": (
        lambda: bmt.auto_wrap(nn.Sequential(Tower(), torch.jit.script(nn.Linear(2, 2)))), ValueError,
        r"'1' is a scripted module, .* Use the module that was passed to torch\.jit\.script",
    ),
    "wrapped twice": (lambda: bmt.auto_wrap(wrapped()), ValueError, "wrapped already"),
    "half after wrapping": (lambda: wrapped().half(), RuntimeError, "Cast the model before auto_wrap"),
    "moved after wrapping": (lambda: wrapped().to("meta"), RuntimeError, "which moves it to the rank's device"),
    "optimizer before wrapping": (optimizer_before_wrapping, ValueError, "Create the optimizer after auto_wrap"),
    "backward without a loss": (lambda: manager_of(wrapped()).backward(), ValueError, r"manager\.backward\(loss\)"),
    "step without an optimizer": (lambda: bmt.optim.OptimManager().step(), RuntimeError, "Call add_optimizer first"),
    "loss scale 0": (lambda: bmt.optim.OptimManager(loss_scale=0), ValueError, "positive or None"),
    "stepped before backward": (stepped_between, RuntimeError, "Run forward again"),
    "tensor hook": (lambda: wrapped().head.weight.register_hook(print), RuntimeError, "post_accumulate_grad_hook"),
    "other data": (
        lambda: setattr(wrapped().head.weight, "data", torch.ones(3, 6)), RuntimeError, r"to a tensor of.*\(2, 6\)",
    ),
    "resized embeddings": (
        lambda: wrapped(lambda: build("llama")).resize_token_embeddings(99), RuntimeError, "before auto_wrap",
    ),
    "resized while gathered": (resized_in_gathered, RuntimeError, "Resize, tie or replace before auto_wrap"),
    "written while gathered": (write_in_gathered, RuntimeError, "modify=True"),
    "wrong shape": (
        lambda: wrapped().load_state_dict(state(**{"head.weight": torch.ones(3, 6)})), RuntimeError,
        r"head\.weight.*\(2, 6\).* has shape \(3, 6\)",
    ),
    "another model's state": (
        lambda: wrapped().load_state_dict(nn.Linear(2, 2).state_dict()), RuntimeError,
        r"(?s)Missing key.*Unexpected key",
    ),
    "assigned state": (lambda: wrapped().load_state_dict(state(), assign=True), RuntimeError, "assign=False"),
    "no such file": (lambda: bmt.load(wrapped(), "nowhere.pt"), RuntimeError, r"nowhere\.pt could not be read"),
    "no such folder": (lambda: bmt.save(wrapped(), "no/where.pt"), RuntimeError, r"no/where\.pt could not be written"),
    "a pickled module": (pickled_module, RuntimeError, r"save model\.state_dict\(\)"),
    "gather_result of a list": (lambda: bmt.gather_result([1, 2]), ValueError, "must be a tensor, got type list"),
    "unknown reduction": (lambda: bmt.distributed.all_reduce(torch.ones(1), "median"), ValueError, "sum, avg, max"),
    "no such root": (lambda: bmt.distributed.broadcast(torch.ones(1), 9), ValueError, "ranks are 0 to"),
    "recorded parameter": (
        lambda: bmt.inspect.record_tensor(nn.Parameter(torch.ones(1)), "w"), ValueError, "inspect_model",
    ),
    "nested inspectors": (two_inspectors, RuntimeError, "one `with inspect_tensor"),
    "no such dimension": (
        lambda: bmt.DistributedParameter(torch.ones(1), tp_mode=True, tp_split_dim=1), ValueError, "a dimension of",
    ),
    "a target out of range": (
        lambda: bmt.loss.FusedCrossEntropy()(torch.ones(2, 3), torch.tensor([0, 3])), ValueError, r"target 3 at \[1\]",
    ),
    "an end before the warm-up": (
        lambda: bmt.lr_scheduler.Linear(torch.optim.SGD([torch.ones(1)], 1.0), 1.0, 10, 5), ValueError, "end_iter",
    ),
}  # fmt: skip

ON_TWO_RANKS = {
    "unequal results": (
        lambda: bmt.gather_result(torch.ones(1 + bmt.rank())), ValueError, r"rank 1: \(2,\).*Pad to a common length",
    ),
    "indivisible": (lambda: bmt.distributed.reduce_scatter(torch.ones(3)), ValueError, "must be a multiple"),
    "a file for rank 0 only": (
        lambda: bmt.load(wrapped(), f"/dev/{'nowhere' if bmt.rank() else 'null'}"), RuntimeError, "rank 1: ",
    ),
}  # fmt: skip


def misuse(name, folder):
    act, error, message = (MISUSES | ON_TWO_RANKS)[name]
    with pytest.raises(error, match=message):
        act(folder) if act is pickled_module else act()
    model = wrapped()  # the world goes on
    model(ids(0, bmt.rank())).backward()
    assert all(torch.isfinite(p.gather_gradient()).all() for p in model.parameters())


@pytest.mark.parametrize("name", by_default(MISUSES, "meta model", "half after wrapping"))
def test_misuse(world, name, tmp_path):
    world(2)(misuse, name, str(tmp_path))


@pytest.mark.parametrize("name", by_default(ON_TWO_RANKS, "a file for rank 0 only"))
def test_misuse_of_two_ranks(world, name, tmp_path):
    world(2)(misuse, name, str(tmp_path))


# -- what every rank must call, called on rank 0 alone ---------------------------------------------------------------

COLLECTIVES = {
    "save": lambda model: bmt.save(model, "alone.pt"),
    "load": lambda model: bmt.load(model, "alone.pt"),
    "state_dict": lambda model: model.state_dict(),
    "gathered": lambda model: bmt.gathered(model).__enter__(),
    "inspect_model": lambda model: bmt.inspect.inspect_model(model, "*"),
    "OptimManager.state_dict": lambda model: manager_of(model).state_dict(),
}


def on_rank_0_alone():
    world, model = bmt.current_world(), wrapped()
    barrier = type(world).barrier
    if bmt.rank() != 0:
        return
    type(world).barrier = lambda self, occasion, seconds=1: barrier(self, occasion, 0.5)
    for name, call in COLLECTIVES.items():
        with pytest.raises(RuntimeError, match=f"'{name}.*' needs every rank.*not on rank 0 alone(.|\\n)*rank 1 is "):
            call(model)


@full
def test_on_rank_0_alone():
    ranks = Ranks(2)
    ranks(on_rank_0_alone)
    ranks.stop()
