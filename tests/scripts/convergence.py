"""Whole trainings beside plain torch: MiniLM on BoolQ over five seeds, and a small causal model for 2,000 steps.

    python tests convergence boolq --model MODEL --data DATA --output FOLDER
    python tests convergence causal --output FOLDER

Plain torch runs in one process, hf_bmtrain in two, with the same weights at first and the same rows in each step.
`boolq` runs `recipes/finetune_bert_boolq.py` and `python tests plain_boolq`. `causal` trains a Llama that reads the
sources of Python's library: in plain torch, sharded, and sharded in float8; then LoRA adapters on the trained model, in
plain PEFT and over a base in nf4. Runs that FOLDER already holds are not repeated. Both print a table and draw
`FOLDER/boolq.svg` or `FOLDER/causal.svg`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import ByteLevelBPETokenizer

import hf_bmtrain as bmt
from float8_curves import read_sources
from processes import environment

ROOT = Path(__file__).resolve().parents[2]
LENGTH, VOCABULARY, ROWS, HELD_OUT = 64, 512, 16, 256
CHARACTERS = 4_000_000
EVERY = 100  # steps between evaluations on held-out rows
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
COLORS = ("tab:blue", "tab:orange", "tab:green")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=("boolq", "causal"))
    parser.add_argument("--model", help="boolq: folder of a saved model")
    parser.add_argument("--data", help="boolq: folder with train.jsonl and val.jsonl")
    parser.add_argument("--seeds", type=int, default=5, help="boolq: number of seeds (%(default)s)")
    parser.add_argument("--rows", type=int, help="boolq: train on the first rows only (all)")
    parser.add_argument("--epochs", type=int, default=2, help="boolq: passes over the rows (%(default)s)")
    parser.add_argument("--max-length", type=int, default=40, help="boolq: tokens of a row (%(default)s)")
    parser.add_argument("--steps", type=int, default=2000, help="causal: optimizer steps (%(default)s)")
    parser.add_argument("--only", help="causal: make this run alone, in this process")
    parser.add_argument("--output", type=Path, default=Path("outputs/convergence"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.part == "boolq":
        if not (options.model and options.data):
            parser.error("boolq needs --model and --data")
        boolq(options)
    elif options.only:
        run = RUNS[options.only](options)
        if os.environ.get("RANK", "0") == "0":
            print(write(options.output / f"{options.only}.json", run))
    else:
        causal(options)


# -- MiniLM on BoolQ -------------------------------------------------------------------------------------------------

JOBS = {
    "plain torch": [sys.executable, "tests", "plain_boolq"],
    "hf_bmtrain, 2 processes": [*TORCHRUN, "recipes/finetune_bert_boolq.py"],
}


def boolq(options: argparse.Namespace) -> None:
    data = first_rows(Path(options.data), options.rows, options.output / "data") if options.rows else options.data
    common = ["--model", options.model, "--data", str(data), "--fp32", "--no-checkpoint", "--dropout", "0"]
    common += ["--lr", "2e-4", "--epochs", str(options.epochs), "--max-length", str(options.max_length)]
    runs: dict[str, list[dict]] = {kind: [] for kind in JOBS}
    for seed in range(options.seeds):
        for kind, command in JOBS.items():
            folder = options.output / f"boolq-{kind.split(',')[0].replace(' ', '-')}-{seed}"
            if not (folder / "metrics.json").is_file():
                rows = "32" if kind == "plain torch" else "16"  # of each process
                words = [
                    *command,
                    *common,
                    "--batch-size",
                    rows,
                    "--seed",
                    str(seed),
                    "--output",
                    str(folder.resolve()),
                ]
                subprocess.run(words, cwd=ROOT, env=environment(), check=True, stdout=subprocess.DEVNULL)
            runs[kind].append(json.loads((folder / "metrics.json").read_text("utf-8")))
    print(boolq_table(runs))
    draw_boolq(runs, options.output / "boolq.svg")


def first_rows(data: Path, rows: int, folder: Path) -> Path:
    """Write the first `rows` training rows, and all validation rows, into `folder`, and return it."""
    folder.mkdir(exist_ok=True)
    lines = (data / "train.jsonl").read_text("utf-8").splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(lines[:rows]), encoding="utf-8")
    (folder / "val.jsonl").write_bytes((data / "val.jsonl").read_bytes())
    return folder.resolve()


def boolq_table(runs: dict[str, list[dict]]) -> str:
    """A line for each seed, and the largest difference between the losses of all steps."""
    plain, ours = runs.values()
    lines = [
        "seed | last loss: plain, ours | largest difference of a loss | accuracy: plain, ours | balanced: plain, ours"
    ]
    for seed, (a, b) in enumerate(zip(plain, ours, strict=True)):
        gap = max(abs(x["loss"] - y["loss"]) for x, y in zip(a["steps"], b["steps"], strict=True))
        last, end = (a["steps"][-1]["loss"], b["steps"][-1]["loss"]), (a["epochs"][-1], b["epochs"][-1])
        lines.append(
            f"{seed} | {last[0]:.5f}, {last[1]:.5f} | {gap:.1e} | "
            + " | ".join(f"{end[0][key]:.4f}, {end[1][key]:.4f}" for key in ("accuracy", "balanced_accuracy"))
        )
    for kind, several in runs.items():
        scores = [run["epochs"][-1]["accuracy"] for run in several]
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        lines.append(f"{kind}: accuracy {statistics.mean(scores):.4f}, standard deviation over seeds {spread:.4f}")
    return "\n".join(lines)


def draw_boolq(runs: dict[str, list[dict]], file: Path) -> None:
    figure, axes = new_figure(2)
    for (kind, several), color, style in zip(runs.items(), COLORS, ("-", ":"), strict=False):
        for number, run in enumerate(several):
            losses = means([step["loss"] for step in run["steps"]], 5)
            label = kind if number == 0 else None
            axes[0].plot(*losses, color=color, linestyle=style, linewidth=1.4, label=label)
            scores = [epoch["balanced_accuracy"] for epoch in run["epochs"]]
            axes[1].plot([number], scores[-1:], "o" if style == "-" else "x", color=color, label=label)
    axes[0].set(title="Training loss", xlabel="step", ylabel="cross-entropy, nats")
    axes[1].set(
        title="Held-out rows", xlabel="seed", ylabel="balanced accuracy", ylim=(0.4, 0.7), xticks=range(len(several))
    )
    for own in axes:
        own.legend()
    save(figure, file)


# -- a small causal model --------------------------------------------------------------------------------------------


def causal(options: argparse.Namespace) -> None:
    found = {}
    for name in RUNS:  # each in its own process, so that each has torch's generators and the world for itself
        file = options.output / f"{name}.json"
        if not file.is_file():
            words = [*([sys.executable] if name.startswith("plain") else TORCHRUN), "tests", "convergence", "causal"]
            words += ["--only", name, "--steps", str(options.steps), "--output", str(options.output.resolve())]
            subprocess.run(words, cwd=ROOT, env=environment(), check=True)
        found[name] = json.loads(file.read_text("utf-8"))
    print(causal_table(found))
    draw_causal(found, options.output / "causal.svg")


def causal_table(runs: dict[str, dict]) -> str:
    lines = ["run | held-out loss: first, last | against plain | largest difference of a loss: 100 steps, all | s"]
    for name, run in runs.items():
        plain = runs["plain-lora" if "lora" in name else "plain"]
        gaps = [abs(a - b) for a, b in zip(run["losses"], plain["losses"], strict=True)]
        last, reference = run["held_out"][-1][1], plain["held_out"][-1][1]
        lines.append(
            f"{name} | {run['held_out'][0][1]:.4f}, {last:.4f} | {100 * (last / reference - 1):+.2f} % | "
            f"{max(gaps[:100]):.1e}, {max(gaps):.1e} | {run['seconds']:.0f}"
        )
    return "\n".join(lines)


def draw_causal(runs: dict[str, dict], file: Path) -> None:
    figure, axes = new_figure(2)
    for own, title, names in zip(
        axes,
        ("From random weights", "LoRA on the trained model, other files"),
        (("plain", "sharded", "float8"), ("plain-lora", "nf4-lora")),
        strict=True,
    ):
        for name, color, style in zip(names, COLORS, ("-", ":", "--"), strict=False):
            own.plot(*means(runs[name]["losses"], 20), color=color, linestyle=style, linewidth=1.2, label=name)
            own.plot(*zip(*runs[name]["held_out"], strict=True), ".", color=color)
        own.set(title=title, xlabel="step", ylabel="cross-entropy, nats per token")
        own.legend()
    save(figure, file)


def rows_of_text(part: str) -> torch.Tensor:
    """Rows of LENGTH tokens from the first half of the sources, or from the second, of a tokenizer of the first."""
    texts = read_sources(CHARACTERS)
    half = len(texts) // 2
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts[:half:4], vocab_size=VOCABULARY, min_frequency=2, show_progress=False)
    chosen = texts[:half] if part == "first" else texts[half:]
    numbers = torch.cat([torch.tensor(each.ids, dtype=torch.int64) for each in tokenizer.encode_batch(chosen)])
    return numbers[: len(numbers) // LENGTH * LENGTH].view(-1, LENGTH)


def new_model() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=3, hidden_size=128, intermediate_size=352, vocab_size=VOCABULARY, num_attention_heads=4,
        max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def with_adapters(options: argparse.Namespace) -> Any:
    """The model of the run `plain`, frozen, with adapters at all linear layers."""
    from peft import LoraConfig, get_peft_model

    model = new_model()
    model.load_state_dict(torch.load(options.output / "plain.pt", weights_only=True))
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))


def train(model: Any, part: str, steps: int, lr: float) -> dict:
    """AdamW with a cosine schedule and clipping: the same lines for a plain model and for a wrapped one."""
    wrapped = any(isinstance(parameter, bmt.DistributedParameter) for parameter in model.parameters())
    rank, ranks = (bmt.rank(), bmt.world_size()) if wrapped else (0, 1)
    rows = rows_of_text(part)
    held_out, training = rows[::20][:HELD_OUT], rows[torch.arange(len(rows)) % 20 != 0]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps + 1, pct_start=0.05)
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(0))
    chosen = order.repeat(1 + steps * ROWS // len(order)).split(ROWS)
    losses, points, begin = [], [(0, evaluate(model, held_out))], time.perf_counter()
    for step in range(1, steps + 1):
        ids = training[chosen[step - 1][rank::ranks]]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append((bmt.sum_loss(loss.detach()) if wrapped else loss).item())
        if step % EVERY == 0:
            points.append((step, evaluate(model, held_out)))
    return {"losses": losses, "held_out": points, "seconds": time.perf_counter() - begin}


@torch.no_grad()
def evaluate(model: Any, rows: torch.Tensor) -> float:
    return statistics.mean(model(input_ids=ids, labels=ids).loss.item() for ids in rows.split(64))


def plain(options: argparse.Namespace) -> dict:
    model = new_model()
    run = train(model, "first", options.steps, lr=3e-3)
    torch.save(model.state_dict(), options.output / "plain.pt")
    return run


def sharded(options: argparse.Namespace, **how: Any) -> dict:
    bmt.init_distributed(seed=0)
    return train(bmt.auto_wrap(new_model(), use_checkpoint=False, **how), "first", options.steps, lr=3e-3)


def plain_lora(options: argparse.Namespace) -> dict:
    return train(with_adapters(options), "second", options.steps, lr=1e-3)


def nf4_lora(options: argparse.Namespace) -> dict:
    bmt.init_distributed(seed=0)
    model = bmt.auto_wrap(with_adapters(options), use_checkpoint=False, quantize_frozen="nf4")
    return train(model, "second", options.steps, lr=1e-3)


RUNS: dict[str, Callable[[argparse.Namespace], dict]] = {
    "plain": plain,
    "sharded": sharded,
    "float8": lambda options: sharded(options, float8=True),
    "plain-lora": plain_lora,
    "nf4-lora": nf4_lora,
}


# -- files -----------------------------------------------------------------------------------------------------------


def means(losses: list[float], of: int) -> tuple[list[int], list[float]]:
    """Steps, and the mean of each `of` losses that end there."""
    ends = range(of, len(losses) + 1, of)
    return [*ends], [statistics.mean(losses[end - of : end]) for end in ends]


def write(file: Path, run: dict) -> str:
    file.write_text(json.dumps(run) + "\n", encoding="utf-8")
    return f"{file.name}: held-out loss {run['held_out'][-1][1]:.4f}, {run['seconds']:.0f} s"


def new_figure(columns: int) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "hf_bmtrain"  # the same runs give the same file
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * columns, 3.8), layout="constrained")
    return figure, figure.subplots(1, columns)


def save(figure: Any, file: Path) -> None:
    figure.savefig(file, metadata={"Date": None})
    print(file)


if __name__ == "__main__":
    main()
