"""`torchrun accelerate_script.py NAME`: a test script of Accelerate's in a process that trains with hf_bmtrain."""

import functools
import importlib
import sys

import torch
from accelerate import PartialState

import hf_bmtrain as bmt
from twins import Tower, check_twins, ids


def step() -> None:
    """Training is right over the ranks: nothing that the script did is in its way."""
    check_twins(Tower, lambda model, step, rank: model(ids(step, rank)), steps=2)


def main(name: str) -> None:
    bmt.init_distributed(seed=0, timeout=60)
    assert bmt.world_size() == 2 and torch.distributed.get_backend() == "gloo"
    step()
    script = importlib.import_module(f"accelerate.test_utils.scripts.{name}")
    if hasattr(script, "RegressionDataset"):  # without a seed, gradients are near 0 at times, and miss its tolerance
        script.RegressionDataset = functools.partial(script.RegressionDataset, seed=0)
    end, PartialState.destroy_process_group = PartialState.destroy_process_group, lambda *args: None
    script.main()  # at its end it would end the process group
    step()
    end(PartialState(cpu=True))
    assert not torch.distributed.is_initialized()
    print(f"{name} done on rank {bmt.rank()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
