"""The package as `bmtrain`: scripts with BMTrain's import lines, and what is refused, each in a process of its own."""

import subprocess
import sys

import pytest

from cases import full, in_full
from processes import environment

SCRIPT = """
import os, sys
import torch
import beside  # a module next to the script
import bmtrain as bmt
from bmtrain import config, inspect, lr_scheduler, optim
from bmtrain.block_layer import Block, CheckpointBlock, TransformerBlockList
from bmtrain.distributed import all_gather
from bmtrain.global_var import config as the_same
from bmtrain.inspect.model import inspect_model
from bmtrain.layer import DistributedModule
from bmtrain.loss._function import has_inf_nan
from bmtrain.lr_scheduler.warmup import WarmupLRScheduler
from bmtrain.optim import optim_manager
from bmtrain.optim.adam_offload import AdamOffloadOptimizer
from bmtrain.parameter import DistributedParameter
from bmtrain.store import allgather_objects, broadcast_object
from bmtrain.synchronize import gather_result
import hf_bmtrain

assert __name__ == "__main__" and sys.argv[0] == __file__ and sys.argv[1:] == ["--lr", "1"]
assert config is the_same is hf_bmtrain.config and optim_manager.OptimManager is bmt.optim.OptimManager
assert issubclass(bmt.lr_scheduler.Noam, WarmupLRScheduler) and bmt.Block is Block is CheckpointBlock
assert callable(bmt.synchronize) and bmt.inspect.inspect_model is inspect_model
bmt.init_distributed(seed=0)

class Layer(bmt.DistributedModule):
    def __init__(self):
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.eye(4))
    def forward(self, x):
        return x @ self.weight

layers = TransformerBlockList([Block(Layer()) for _ in range(2)])
optimizer = optim.AdamOptimizer(layers.parameters(), lr=0.1)
manager = optim.OptimManager()
manager.add_optimizer(optimizer, lr_scheduler.NoDecay(optimizer, 0.1, 0, 10))
loss = layers(torch.ones(2, 4)).square().mean()
manager.backward(loss)
manager.step()
assert allgather_objects(bmt.rank()) == list(range(bmt.world_size()))
assert broadcast_object(bmt.rank(), config["comm"], src=bmt.world_size() - 1) == bmt.world_size() - 1
found = torch.zeros(1, dtype=torch.uint8)[0]
has_inf_nan(torch.tensor([1.0, float("inf")]), found)
has_inf_nan(torch.tensor([1.0]), found)
assert found == 1
sys.stdout.write(f"loss {loss.item()} {beside.WORD}\\n")
"""


def launch(folder, size, *arguments, **variables):
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if size == 2 else []
    env = environment(ACCELERATE_USE_CPU="true", **variables)
    return subprocess.run(
        [sys.executable, *ranks, *arguments], env=env, cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("size", [1, *in_full(2)])
def test_a_script_runs_unchanged(tmp_path, size):
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "beside.py").write_text("WORD = 'beside'")
    (scripts / "train.py").write_text(SCRIPT)
    done = launch(tmp_path, size, "-m", "hf_bmtrain.run", "scripts/train.py", "--lr", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss 1.0 beside") == size


@full
def test_what_is_not_offered_is_refused_by_name(tmp_path):
    code = (
        "import hf_bmtrain, pytest\n"
        "hf_bmtrain.install_as_bmtrain()\n"
        "hf_bmtrain.install_as_bmtrain()\n"
        "import bmtrain as bmt\n"
        "with pytest.raises(AttributeError, match=\"'bmtrain.init'.*'topology'.*pipeline\"):\n"
        "    bmt.init.topology\n"
        "with pytest.raises(ImportError, match=\"'send_activations' from 'bmtrain.dist\"):\n"
        "    from bmtrain.distributed import send_activations\n"
        "with pytest.raises(AttributeError, match=\"no attribute 'nothing'\"): bmt.nothing\n"
        "with pytest.raises(ModuleNotFoundError, match='bmtrain.nccl'): import bmtrain.nccl\n"
        "assert not hasattr(bmt.nn, '__file__')\n"
    )
    done = launch(tmp_path, 1, "-c", code)
    assert done.returncode == 0, done.stderr


@full
def test_bmtrain_itself(tmp_path):
    (tmp_path / "bmtrain").mkdir()
    (tmp_path / "bmtrain" / "__init__.py").write_text("")
    installed = (
        "import hf_bmtrain; hf_bmtrain.install_as_bmtrain()\n"
        "import bmtrain; assert bmtrain.auto_wrap is hf_bmtrain.auto_wrap"
    )
    done = launch(tmp_path, 1, "-c", installed)
    assert done.returncode == 0 and "bmtrain is installed" in done.stderr, done.stderr
    done = launch(tmp_path, 1, "-c", "import bmtrain, hf_bmtrain; hf_bmtrain.install_as_bmtrain()")
    assert done.returncode == 1 and "BMTrain itself is already imported" in done.stderr


@full
def test_the_command_line(tmp_path):
    assert "usage: python -m hf_bmtrain.run SCRIPT" in launch(tmp_path, 1, "-m", "hf_bmtrain.run").stderr
    assert "there is no script 'none.py'" in launch(tmp_path, 1, "-m", "hf_bmtrain.run", "none.py").stderr
