"""The GPT recipe from the command line to its output folder."""

import json
from pathlib import Path

import pytest
import torch
from small_job import PYTHON, ROOT, TWO_RANKS, run
from tokenizers import Tokenizer

import hf_bmtrain as bmt
from cases import full, in_slow
from gpt2.data import IGNORED, cut, endless_batches, generate_text, read_text, train_tokenizer
from ranks import on_ranks

RECIPE = ROOT / "recipes" / "train_gpt2.py"
TINY = ("--dim-model", 32, "--num-heads", 2, "--dim-ff", 64, "--steps", 30, "--warmup", 10)


def train(folder: Path, launcher: list[str], *options: object) -> dict:
    done = run(launcher, RECIPE, "--output", folder, *options)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "metrics.json").read_text()) | {"said": done.stdout}


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file other than the recipe's generated stories."""
    file = tmp_path_factory.mktemp("book") / "book.txt"
    lines = (f"{number} and {number + 1} make {2 * number + 1} – naïve arithmetic." for number in range(500))
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def one(book: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    folder = tmp_path_factory.mktemp("one")
    return train(folder, PYTHON, "--data", book, *TINY, "--batch-size", 8), folder


@full
def test_the_default_learns_the_stories(tmp_path):
    """From ln 512 = 6.2 nats per token to below 0.8, of which the random choice of words is about 0.2."""
    metrics = train(tmp_path, PYTHON)
    assert metrics["held_out"][0]["loss"] == pytest.approx(6.24, abs=0.1)
    assert metrics["held_out"][-1]["loss"] < 0.8
    assert metrics["seconds"] < 120
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "gave the" in metrics["said"]
    assert len(metrics["steps"]) == 200
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size() <= 512


@full
def test_two_processes_follow_one(book, one, tmp_path):
    two = train(tmp_path, TWO_RANKS, "--data", book, *TINY, "--batch-size", 4)
    assert two["world_size"] == 2
    for here, there in zip(one[0]["steps"], two["steps"], strict=True):
        assert here["loss"] == pytest.approx(there["loss"], abs=2e-5)
        assert here["grad_norm"] == pytest.approx(there["grad_norm"], rel=1e-3)
    ours, theirs = (torch.load(folder / "model.pt", weights_only=True) for folder in (one[1], tmp_path))
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, rtol=0, atol=1e-3)
    losses = [step["loss"] for step in one[0]["steps"]]
    assert losses[-1] < 0.6 * losses[0]


@full
def test_it_goes_on_from_its_checkpoint(book, one, tmp_path):
    more = train(tmp_path, PYTHON, "--data", book, *TINY, "--batch-size", 8, "--load", one[1] / "model.pt")
    assert more["held_out"][0]["loss"] == pytest.approx(one[0]["held_out"][-1]["loss"], abs=1e-6)
    assert more["held_out"][-1]["loss"] < more["held_out"][0]["loss"]


@full
@pytest.mark.parametrize("dtype", ["bf16", *in_slow("fp16")])
def test_half_precision(book, one, dtype, tmp_path):
    half = train(tmp_path, PYTHON, "--data", book, *TINY, "--batch-size", 8, f"--{dtype}")
    assert half["held_out"][-1]["loss"] == pytest.approx(one[0]["held_out"][-1]["loss"], abs=0.1)
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert {value.dtype for value in state.values()} == {{"fp16": torch.half, "bf16": torch.bfloat16}[dtype]}


@full
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--data", "nowhere.txt"), "nowhere.txt"),
        (("--length", 200000), "give --data more text"),
        (("--batch-size", 5000), "do not fill one step of 5000"),
        (("--load", "nowhere.pt"), "nowhere.pt could not be read"),
    ],
)
def test_a_mistake_is_one_line(options, message, tmp_path):
    done = run(PYTHON, RECIPE, "--output", tmp_path, *options)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_rows_hold_the_text():
    text = generate_text(seed=3, stories=40)
    tokenizer = train_tokenizer(text, 400)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    training, held_out = cut(text, tokenizer, 16)
    rows = [*zip(training.tokens, training.lengths), *zip(held_out.tokens, held_out.lengths)]
    numbers = [rows[0][0][0].item(), *(n for tokens, length in rows for n in tokens[1 : length + 1].tolist())]
    assert tokenizer.decode(numbers) == text
    inputs, lengths, targets = held_out.batch(torch.arange(len(held_out)), torch.device("cpu"))
    assert torch.equal(inputs[:, 1:][targets[:, :-1] != IGNORED], targets[:, :-1][targets[:, :-1] != IGNORED])
    assert (targets != IGNORED).sum(1).tolist() == lengths.tolist()


@full
def test_ranks_share_the_rows_of_one():
    text = generate_text(seed=0, stories=30)
    rows, _ = cut(text, train_tokenizer(text, 300), 16)
    alone = endless_batches(rows, 6, 0, 1, seed=1)
    parts = [endless_batches(rows, 3, rank, 2, seed=1) for rank in range(2)]
    for _ in range(2 * len(rows) // 6):
        together = torch.cat([next(part) for part in parts])
        assert sorted(together.tolist()) == sorted(next(alone).tolist())


@full
def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "image.bin").write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(ValueError, match=r"image\.bin is not UTF-8"):
        read_text([tmp_path / "image.bin"])


@on_ranks(2, full=(1,))
def test_the_model():
    """The sharded GPT equals its own layers computed from whole weights in plain torch, and attends as it should."""
    from gpt2.model import GPT

    sizes = {"num_layers": 2, "vocab_size": 11, "dim_model": 8, "dim_head": 4, "num_heads": 2, "dim_ff": 16}
    model = GPT(**sizes, max_distance=6)
    bmt.init_parameters(model)
    inputs = torch.tensor([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]])
    positions = torch.arange(6).expand(2, 6)
    lengths = torch.tensor([6, 3])
    logits = model(inputs, positions, positions < lengths[:, None])
    changed = inputs.clone()
    changed[0, 4], changed[1, 3:] = 9, 9
    other = model(changed, positions, positions < lengths[:, None])
    assert torch.equal(other[0, :4], logits[0, :4]) and not torch.equal(other[0, 4:], logits[0, 4:])
    assert torch.equal(other[1, :3], logits[1, :3])
    state = model.state_dict()
    F = torch.nn.functional
    x = state["tokens.weight"][inputs] + state["positions.weight"][positions]
    for layer in range(2):
        get = {name.split(f"blocks.{layer}.")[1]: v for name, v in state.items() if f"blocks.{layer}." in name}
        normed = F.layer_norm(x, (8,), get["attention_norm.weight"], get["attention_norm.bias"])
        packed = normed @ get["attention.queries_keys_values.weight"].T + get["attention.queries_keys_values.bias"]
        q, k, v = (part.reshape(2, 6, 2, 4).transpose(1, 2) for part in packed.split(8, -1))
        scores = q @ k.transpose(-1, -2) / 2
        seen = torch.ones(6, 6).tril().bool() & (positions < lengths[:, None])[:, None, None, :]
        mixed = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2).reshape(2, 6, 8)
        x = x + mixed @ get["attention.out.weight"].T + get["attention.out.bias"]
        normed = F.layer_norm(x, (8,), get["feed_forward_norm.weight"], get["feed_forward_norm.bias"])
        inner = F.gelu(normed @ get["feed_forward.up.weight"].T + get["feed_forward.up.bias"], approximate="tanh")
        x = x + inner @ get["feed_forward.down.weight"].T + get["feed_forward.down.bias"]
    expected = F.layer_norm(x, (8,), state["norm.weight"], state["norm.bias"]) @ state["tokens.weight"].T
    torch.testing.assert_close(logits.detach(), expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="6 positions"):
        model(torch.ones(1, 7, dtype=torch.long), torch.arange(7)[None], torch.ones(1, 7, dtype=torch.bool))
