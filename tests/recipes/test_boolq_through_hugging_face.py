"""The BoolQ job through Trainer and through Accelerate, under every launcher, against plain torch."""

import sys

import pytest
import torch
from small_job import PYTHON, ROOT, TWO_RANKS, check_same_curves, run, train
from transformers import AutoModelForSequenceClassification

from cases import full, rows_in_full
from ranks import free_port

RECIPES = {name: ROOT / "recipes" / f"{name}_boolq.py" for name in ("trainer", "accelerate")}
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
use_cpu: false
"""


def launcher(name: str, folder) -> list[str]:
    """The command in front of the script, for two processes."""
    port = ["--main_process_port", str(free_port())]
    if name == "torchrun":
        return TWO_RANKS
    if name == "torch.distributed.launch":
        # --use-env: else it adds an option to the script's command line
        return [sys.executable, "-m", name, "--use-env", "--nproc-per-node", "2", "--master-port", str(free_port())]
    if name == "accelerate launch":
        return [*ACCELERATE, "--multi_gpu", "--num_processes", "2", "--num_machines", "1", *port]
    assert name == "accelerate launch with a file"
    (folder / "accelerate.yaml").write_text(CONFIG)
    return [*ACCELERATE, "--config_file", str(folder / "accelerate.yaml"), *port]


def check(ours: dict, plain: dict, world_size: int) -> None:
    check_same_curves(ours, plain)
    assert ours["world_size"] == world_size
    losses = [step["loss"] for step in ours["steps"]]
    assert losses[-1] < 0.7 * losses[0]  # it has moved, so agreeing says something


@pytest.mark.slow  # two processes follow it, too
@pytest.mark.parametrize("name", RECIPES)
def test_one_process_follows_plain_torch(small, plain, name):
    ours = train(small, f"{name}_one", PYTHON, RECIPES[name], "--dropout", 0, "--batch-size", 16)
    check(ours, plain, 1)
    assert ours["epochs"][-1]["accuracy"] > 0.75


LAUNCHED = [
    *rows_in_full([("trainer", "torchrun"), ("accelerate", "accelerate launch")]),
    *[
        pytest.param(name, launched, marks=pytest.mark.slow)
        for name, launched in [
            ("trainer", "accelerate launch"), ("trainer", "accelerate launch with a file"),
            ("trainer", "torch.distributed.launch"), ("accelerate", "torchrun"),
            ("accelerate", "accelerate launch with a file"), ("accelerate", "torch.distributed.launch"),
        ]
    ],
]  # fmt: skip


@pytest.mark.parametrize(("name", "launched"), LAUNCHED)
def test_two_processes_follow_one(small, plain, tmp_path, name, launched):
    output = f"{name}_{launched}".replace(" ", "_")
    ours = train(small, output, launcher(launched, tmp_path), RECIPES[name], "--dropout", 0, "--batch-size", 8)
    check(ours, plain, 2)
    model = AutoModelForSequenceClassification.from_pretrained(small / output)
    assert model.config.id2label == {0: "False", 1: "True"}
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


@full
@pytest.mark.parametrize("name", RECIPES)
def test_a_mistake_is_one_line_and_status_2(small, name, tmp_path):
    data = small / "nowhere"
    done = run(PYTHON, RECIPES[name], "--model", small / "model", "--data", data, "--output", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: ") and "no such folder" in done.stderr


UNAWARE = """
import torch, hf_bmtrain as bmt
from accelerate import Accelerator
bmt.init_distributed()
accelerator = Accelerator()
model = accelerator.prepare(bmt.auto_wrap(torch.nn.Linear(2, 2)))
model(torch.ones(1, 2)).sum().backward()
"""


@full
def test_an_accelerator_that_does_not_see_the_other_ranks(tmp_path):
    """torchrun on a machine without GPUs, and nobody told Accelerate to use the CPU."""
    script = tmp_path / "unaware.py"
    script.write_text(UNAWARE)
    done = run(TWO_RANKS, script, ACCELERATE_USE_CPU="false")
    assert done.returncode != 0
    assert "Accelerate sees 1 process(es), but hf_bmtrain has 2 ranks" in done.stderr
