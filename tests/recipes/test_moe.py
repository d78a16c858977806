"""The recipe for mixtures of experts, from the command line to its model."""

import json
from pathlib import Path

import pytest
import torch
from small_job import PYTHON, ROOT, TWO_RANKS, run
from transformers import AutoModelForCausalLM, AutoTokenizer

from cases import full, slow
from gpt2.data import generate_text
from sft.data import Rows, ask, cut
from sft.options import parse_moe_options, parse_options

peft = pytest.importorskip("peft")
RECIPE = ROOT / "recipes" / "moe.py"
TINY = ("--base-steps", 5, "--steps", 6, "--rank", 4)


def train(folder: Path, launcher: list[str], *options: object) -> dict:
    done = run(launcher, RECIPE, "--output", folder, *options)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "metrics.json").read_text()) | {"said": done.stdout}


@full
def test_two_processes_follow_one(tmp_path):
    """What is saved opens in plain PEFT; each step has the numbers of the routers."""
    one, two = (train(tmp_path / name, how, *TINY, "--lora") for name, how in (("1", PYTHON), ("2", TWO_RANKS)))
    for here, there in zip(one["steps"], two["steps"], strict=True):
        assert here["loss"] == pytest.approx(there["loss"], abs=5e-5)
    for here, there in zip(one["router"], two["router"], strict=True):
        assert here["router/busiest_share"] == pytest.approx(there["router/busiest_share"], abs=0.01)
        assert 1 / 8 < here["router/busiest_share"] <= 1
        assert "router/aux_loss" not in here, "routers are frozen"
    assert len(one["router"]) == 6 and "router/busiest_share" in one["said"]
    model = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "1" / "model").eval()
    rows = Rows(
        cut(ask(generate_text(0).splitlines()))[1], AutoTokenizer.from_pretrained(tmp_path / "1" / "model"), 512
    )
    with torch.no_grad():
        losses = [model(**{key: torch.tensor([values]) for key, values in row.items()}).loss for row in rows]
    assert not [name for name, _ in model.named_parameters() if ".gate." in name and "lora" in name]
    assert torch.stack(losses).mean().item() == pytest.approx(one["held_out"][-1]["loss"], rel=0.02)


@slow
def test_two_processes_follow_one_with_trained_routers(tmp_path):
    """The auxiliary loss counts once; it is that of each rank's rows, so that later steps drift apart a little."""
    one, two = (train(tmp_path / name, how, *TINY) for name, how in (("1", PYTHON), ("2", TWO_RANKS)))
    losses = [[step["loss"] for step in each["steps"]] for each in (one, two)]
    assert losses[0][0] == pytest.approx(losses[1][0], abs=5e-5)
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)


@full
def test_the_default_learns_to_answer(tmp_path):
    metrics = train(tmp_path, PYTHON)
    assert all(step["router/aux_loss"] > 1 for step in metrics["router"])
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert metrics["right_before"] < 0.1
    assert metrics["right_after"] > 0.9


@full
def test_mistakes_are_one_line(tmp_path):
    done = run(PYTHON, RECIPE, "--output", tmp_path, "--quantize", "nf4")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr == "error: --quantize stores frozen weights, but without --lora none are frozen: add --lora\n"


@full
def test_help_tells_the_defaults(capsys):
    """Of the learning rate, which depends on --model and --lora; the adapters' options need --lora."""
    for parse, rates, adapters in (
        (parse_options, "(2e-4, small new model: 5e-3)", "adapters:"),
        (parse_moe_options, "(1e-5, small new model: 2e-3; with --lora 2e-4, small new model: 5e-3)", "with --lora:"),
    ):
        with pytest.raises(SystemExit):
            parse(["--help"])
        told = " ".join(capsys.readouterr().out.split())
        assert rates in told and f"{adapters} --quantize" in told
