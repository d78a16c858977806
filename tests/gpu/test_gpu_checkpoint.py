"""save_state and load_state on GPUs, and from a GPU to the CPU and back."""

import pytest
import torch
import transformers

import hf_bmtrain as bmt
from ranks import Ranks
from resumable import Training, interrupted, undisturbed
from state_dicts import check_equal
from tiny_models import build

pytestmark = pytest.mark.gpu

CASES = [
    {"family": "llama", "dtype": torch.bfloat16},
    {"family": "gpt2", "optimizer": "offload", "dtype": torch.bfloat16, "tied": True},
    {"family": "bert", "dtype": torch.float16},
    {"family": "llama", "optimizer": "adamw", "zero_level": 2},
]


@pytest.mark.parametrize("non_blocking", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_resumed_is_undisturbed(gpus, tmp_path, case, non_blocking):
    truth = gpus(undisturbed, case)
    for (losses, values), (true_losses, true_values) in zip(
        gpus(interrupted, str(tmp_path), case, non_blocking), truth
    ):
        assert losses == true_losses
        if true_values:
            check_equal(values, true_values)


def save(folder, case):
    training = Training(**case)
    training.load(folder)
    training.train(training.step + 2)
    training.save(folder)
    training.reshard(folder)
    return {name: value.cpu() for name, value in training.whole().items()}


def load(folder, case):
    training = Training(**case, seed=1)
    assert training.load(folder) is not None
    return {name: value.cpu() for name, value in training.whole().items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_other_devices(gpu, tmp_path, case):
    """Masters are residuals on a GPU, and float32 on the CPU."""
    cpu = Ranks(1)
    try:
        for saving, loading in ((gpu, cpu), (cpu, gpu)):
            saved = saving(save, str(tmp_path), case)[0]
            check_equal(loading(load, str(tmp_path), case)[0], saved)
    finally:
        cpu.stop()


def loaded_both_ways(folder, dtype):
    plain = bmt.auto_wrap(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))
    model = bmt.hf.from_pretrained(transformers.AutoModelForCausalLM, folder, dtype=dtype)
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    assert {one.device for one, _ in pairs} == {bmt.current_world().device}
    return all(torch.equal(one.buffer.shard, other.buffer.shard) for one, other in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_pretrained(gpus, tmp_path, dtype):
    build("llama").save_pretrained(tmp_path)
    assert all(gpus(loaded_both_ways, str(tmp_path), dtype))
