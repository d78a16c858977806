"""The LoRA recipe from the command line to its adapters."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from small_job import PYTHON, ROOT, TWO_RANKS, run
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_bmtrain as bmt
from cases import full, rows_in_full, slow
from gpt2.data import ANIMALS, generate_text
from sft.base import small_llama, train_tokenizer
from sft.data import IGNORED, Example, Rows, ask, cut, read
from sft.options import parse_options
from sft.training import Record
from sft.training import train as train_rows

peft = pytest.importorskip("peft")
RECIPE = ROOT / "recipes" / "lora.py"
TINY = ("--base-steps", 5, "--steps", 6, "--rank", 4)


def train(folder: Path, launcher: list[str], *options: object) -> dict:
    done = run(launcher, RECIPE, "--output", folder, *options)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "metrics.json").read_text()) | {"said": done.stdout}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    folder = tmp_path_factory.mktemp("one")
    return train(folder, PYTHON, *TINY), folder


@full
def test_adapters_open_in_plain_peft(one):
    metrics, folder = one
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "a held-out prompt: " in metrics["said"] and "  before: " in metrics["said"]
    assert len(metrics["steps"]) == 6 and metrics["held_out"][-1]["loss"] < metrics["held_out"][0]["loss"]
    model = peft.AutoPeftModelForCausalLM.from_pretrained(folder / "adapter").eval()
    base = AutoModelForCausalLM.from_pretrained(folder / "base").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "adapter")
    rows = Rows(cut(ask(generate_text(0).splitlines()))[1], tokenizer, 512)
    losses = [mean_loss(each, rows) for each in (base, model)]
    assert losses == pytest.approx([metrics["held_out"][at]["loss"] for at in (0, -1)], rel=1e-3)


@torch.no_grad()
def mean_loss(model, rows) -> float:
    losses = [model(**{name: torch.tensor([values]) for name, values in row.items()}).loss for row in rows]
    return torch.stack(losses).mean().item()


@full
def test_two_processes_follow_one(one, tmp_path):
    two = train(tmp_path, TWO_RANKS, *TINY)
    assert two["world_size"] == 2
    for here, there in zip(one[0]["steps"], two["steps"], strict=True):
        assert here["loss"] == pytest.approx(there["loss"], abs=2e-5)
        assert here["grad_norm"] == pytest.approx(there["grad_norm"], rel=1e-3)


@slow
def test_the_default_learns_to_answer(tmp_path):
    metrics = train(tmp_path, PYTHON)
    assert metrics["right_before"] < 0.1
    assert metrics["right_after"] > 0.9


@full
def test_a_model_and_rows_of_ones_own(one, tmp_path):
    rows = [{"prompt": f"After {number} comes", "completion": f" {number + 1}."} for number in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ("--model", one[1] / "base", "--data", tmp_path / "rows.jsonl", "--steps", 6, "--lr", 5e-3, "--bf16")
    given += ("--quantize", "nf4")
    metrics = train(tmp_path / "out", PYTHON, *given)
    assert metrics["held_out"][-1]["loss"] < metrics["held_out"][0]["loss"]
    assert "After 54 comes" in metrics["said"]


@full
@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ('{"prompt": "a", "completion": "b"}\n{"prompt": 1, "completion": "b"}', "line 2"),
        *rows_in_full(
            [
                ('{"prompt": "a"}', r"rows.jsonl, line 1: no key 'completion' \(found 'prompt'\)"),
                ('{"prompt": "a", "completion": ""}', "line 1: 'completion' must be a text"),
                ("\nno json", "rows.jsonl, line 2: not valid JSON"),
                ("[1]", "line 1: a JSON object is needed, found list"),
            ]
        ),
    ],
)
def test_a_wrong_row_is_named(tmp_path, lines, told):
    (tmp_path / "rows.jsonl").write_text(lines)
    with pytest.raises(ValueError, match=told):
        read(tmp_path / "rows.jsonl")


@full
def test_bytes_that_are_no_text_and_a_missing_file_are_named(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "", "completion": "b"}\n{"prompt": "\xff"}')
    with pytest.raises(ValueError, match="rows.jsonl, line 2: not UTF-8"):
        read(tmp_path / "rows.jsonl")
    with pytest.raises(FileNotFoundError, match="--data .*none.jsonl: no such file"):
        read(tmp_path / "none.jsonl")


@full
def test_a_mistake_is_one_line(tmp_path):
    done = run(PYTHON, RECIPE, "--output", tmp_path, "--data", "nowhere.jsonl")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: ") and "nowhere.jsonl" in done.stderr


@full
def test_questions_follow_from_their_story():
    (example,) = ask(["The owl found a bell near the mill. The hare came to the mill and saw the bell. So the owl gave "
                      "the hare the bell, and now the hare has the bell."])  # fmt: skip
    asked = "The owl found a bell near the mill. The hare came to the mill and saw the bell. Who has the bell now?"
    assert example == Example(asked, " The hare.")
    with pytest.raises(ValueError, match="9 rows are too few"):
        cut([example] * 9)


@full
def test_targets_are_the_completions():
    class Letters:
        eos_token_id = 0

        def __call__(self, text, **options):
            return {"input_ids": [ord(letter) for letter in text]}

    (row,) = Rows([Example("abcdefgh", "xyz")], Letters(), 10)
    assert row["input_ids"] == [*map(ord, "cdefghxyz"), 0]
    assert row["labels"] == [IGNORED] * 6 + [*map(ord, "xyz"), 0]


@full
def test_the_options_have_defaults():
    options = parse_options([])
    assert (options.quantize, options.model, options.rank) == (None, None, 16)


def test_held_out_questions_are_not_trained_on():
    training, held_out = cut(ask(generate_text(seed=0).splitlines()))
    assert not {*training} & {*held_out}


def losses_of_held_out_rows(count: int) -> tuple[float, float]:
    """Return the held-out loss that the recipe records before it trains, and the mean over all rows in plain torch."""
    stories = generate_text(seed=0, stories=60).splitlines()
    tokenizer = train_tokenizer(stories)
    tokenizer.add_tokens([f" The {animal}." for animal in ANIMALS])  # completions of equal lengths have equal weights
    training, held_out = ask(stories)[:-count], ask(stories)[-count:]
    torch.manual_seed(0)
    model = small_llama(tokenizer)
    plain = mean_loss(model, Rows(held_out, tokenizer, 512))
    bmt.auto_wrap(model)
    options, record = parse_options(["--steps", "1", "--batch-size", "4", "--lr", "1e-3"]), Record()
    options.output = tempfile.mkdtemp()
    train_rows(model, tokenizer, training, held_out, options, record)
    return record.points[0]["loss"], plain


@full
def test_the_held_out_loss_is_of_all_rows(world):
    for recorded, plain in world(2)(losses_of_held_out_rows, 7):
        assert recorded == pytest.approx(plain, rel=1e-5)
