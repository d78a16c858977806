"""Whole trainings beside plain torch: MiniLM on BoolQ over five seeds, and a causal model for 2,000 steps.

    python tests convergence boolq --model MODEL --data DATA --output FOLDER
    python tests convergence causal --output FOLDER
    python tests convergence causal --runs plain sharded FSDP2 --output FOLDER
    python tests convergence causal --size 100m --jobs 9 --output FOLDER    on 2 GPUs

Plain torch runs in one process, hf_bmtrain in two, with the same weights at first and the same rows in each step.
`boolq` runs `recipes/finetune_bert_boolq.py` and `python tests plain_boolq`. `causal` trains a Llama that reads the
sources of Python's library, in each way of RUNS; then LoRA adapters on the model that plain torch has trained, in
plain PEFT and over a base in nf4. Processes share the GPUs, if there are any. Runs that FOLDER holds are not repeated.
Both print a table and draw `FOLDER/boolq.svg` or `FOLDER/causal.svg`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import ByteLevelBPETokenizer

import hf_bmtrain as bmt
from float8_curves import read_sources
from processes import environment

ROOT = Path(__file__).resolve().parents[2]
HELD_OUT = 256
EVERY = 100  # steps between evaluations on held-out rows
ON_GPUS = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if ON_GPUS else torch.device("cpu")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink")


@dataclass(frozen=True)
class Size:
    """A causal model and its rows; a step has `rows` of them, divided among the ranks."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    rows: int
    characters: int
    lr: float


SIZES = {
    "small": Size(3, 128, 4, 512, 64, 16, 4_000_000, 3e-3),
    "100m": Size(12, 768, 12, 16384, 512, 8, 32_000_000, 6e-4),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=("boolq", "causal"))
    parser.add_argument("--model", help="boolq: folder of a saved model")
    parser.add_argument("--data", help="boolq: folder with train.jsonl and val.jsonl")
    parser.add_argument("--seeds", type=int, default=5, help="boolq: number of seeds (%(default)s)")
    parser.add_argument("--rows", type=int, help="boolq: train on the first rows only (all)")
    parser.add_argument("--epochs", type=int, default=2, help="boolq: passes over the rows (%(default)s)")
    parser.add_argument("--max-length", type=int, default=40, help="boolq: tokens of a row (%(default)s)")
    parser.add_argument("--size", choices=SIZES, default="small", help="causal: size of the model (%(default)s)")
    parser.add_argument("--steps", type=int, default=2000, help="causal: optimizer steps (%(default)s)")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=[*RUNS], help="causal: which (all)")
    parser.add_argument("--only", choices=RUNS, help="causal: make this run alone, in this process")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("outputs/convergence"))
    options = parser.parse_args()
    options.output = options.output.resolve()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.part == "boolq":
        if not (options.model and options.data):
            parser.error("boolq needs --model and --data")
        boolq(options)
    elif not {"plain", *map(compared_with, options.runs)} <= {*options.runs}:
        parser.error("--runs needs plain, and plain-lora beside nf4-lora: the others are compared with them")
    elif options.only:
        run = RUNS[options.only](options)
        if os.environ.get("RANK", "0") == "0":
            print(write(options.output / f"{options.only}.json", run))
    else:
        causal(options)


def run_all(commands: Sequence[Sequence[str]], jobs: int) -> None:
    """Run commands, some at a time. Each sees the GPUs, if there are any; its output is shown if it fails."""
    environ = environment() | (
        {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")} if ON_GPUS else {}
    )

    def run(words: Sequence[str]) -> None:
        begin = time.perf_counter()
        done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        print(f"{time.perf_counter() - begin:6.0f} s  {' '.join(words[-8:])}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, commands))


# -- MiniLM on BoolQ -------------------------------------------------------------------------------------------------

JOBS = {
    "plain torch": [sys.executable, "tests", "plain_boolq"],
    "hf_bmtrain, 2 processes": [*TORCHRUN, "recipes/finetune_bert_boolq.py"],
}


def boolq(options: argparse.Namespace) -> None:
    data = first_rows(Path(options.data), options.rows, options.output / "data") if options.rows else options.data
    common = ["--model", options.model, "--data", str(data), "--fp32", "--no-checkpoint", "--dropout", "0"]
    common += ["--lr", "2e-4", "--epochs", str(options.epochs), "--max-length", str(options.max_length)]
    folders: dict[str, list[Path]] = {}
    commands = []
    for kind, command in JOBS.items():
        name = kind.split(",")[0].replace(" ", "-")
        folders[kind] = [options.output / f"boolq-{name}-{seed}" for seed in range(options.seeds)]
        rows = "32" if kind == "plain torch" else "16"  # of each process
        for seed, folder in enumerate(folders[kind]):
            own = ["--batch-size", rows, "--seed", str(seed), "--output", str(folder)]
            if not (folder / "metrics.json").is_file():
                commands.append([*command, *common, *own])
    run_all(commands, options.jobs)
    runs = {
        kind: [json.loads((folder / "metrics.json").read_text("utf-8")) for folder in several]
        for kind, several in folders.items()
    }
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


# -- a causal model ----------------------------------------------------------------------------------------------------


def causal(options: argparse.Namespace) -> None:
    tokens(options)  # before several processes want them
    for later in (False, True):  # adapters are put on the model of the run `plain`
        names = [name for name in options.runs if ("lora" in name) == later and not done(options, name)]
        commands = []
        for name in names:  # each in its own processes, so that each has torch's generators and the world for itself
            words = [*([sys.executable] if name.startswith("plain") else TORCHRUN), "tests", "convergence", "causal"]
            words += ["--size", options.size, "--steps", str(options.steps), "--output", str(options.output)]
            commands.append([*words, "--only", name])
        run_all(commands, options.jobs)
    shown = [name for name in RUNS if name in options.runs]
    found = {name: json.loads((options.output / f"{name}.json").read_text("utf-8")) for name in shown}
    print(causal_table(found))
    draw_causal(found, options.output / "causal.svg")


def done(options: argparse.Namespace, name: str) -> bool:
    return (options.output / f"{name}.json").is_file()


def compared_with(name: str) -> str:
    return "plain-lora" if "lora" in name else "plain"


def causal_table(runs: dict[str, dict]) -> str:
    lines = [
        "| run | held-out loss, at first | at the end | against plain | largest difference of a training loss, "
        "first 100 steps | all steps | s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, run in runs.items():
        plain = runs[compared_with(name)]
        gaps = [abs(a - b) for a, b in zip(run["losses"], plain["losses"], strict=True)]
        last, reference = run["held_out"][-1][1], plain["held_out"][-1][1]
        lines.append(
            f"| {name} | {run['held_out'][0][1]:.4f} | {last:.4f} | {100 * (last / reference - 1):+.2f} % | "
            f"{max(gaps[:100]):.1e} | {max(gaps):.1e} | {run['seconds']:.0f} |"
        )
    return "\n".join(lines)


def draw_causal(runs: dict[str, dict], file: Path) -> None:
    trained, adapted = ([name for name in runs if ("lora" in name) == later] for later in (False, True))
    figure, axes = new_figure(3 if adapted else 2)
    panels = [(axes[0], "From random weights", trained)]
    panels += [(axes[2], "LoRA on the trained model, other files", adapted)] if adapted else []
    for own, title, names in panels:
        for name, color, style in zip(names, COLORS, ("-", ":", "--", ":", "-", "--", ":")):
            own.plot(*means(runs[name]["losses"], 20), color=color, linestyle=style, linewidth=1.2, label=name)
        own.set(title=title, xlabel="step", ylabel="training loss, nats per token")
        own.legend()
    for name, color in zip(trained, COLORS):
        points = zip(runs[name]["held_out"], runs["plain"]["held_out"], strict=True)
        steps, differences = zip(*((step, 100 * (own / plain - 1)) for (step, own), (_, plain) in points), strict=True)
        axes[1].plot(steps, differences, ".-", color=color, linewidth=0.8, label=name)
    axes[1].set(title="Held-out loss against plain torch", xlabel="step", ylabel="%")
    save(figure, file)


def tokens(options: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Rows of tokens of the first half of the sources and of the second, kept in a file."""
    file = options.output / "tokens.pt"
    if not file.is_file():
        size = SIZES[options.size]
        texts = read_sources(size.characters)
        half = len(texts) // 2
        tokenizer = ByteLevelBPETokenizer()
        stride = max(4, size.characters // 8_000_000)
        tokenizer.train_from_iterator(
            texts[:half:stride], vocab_size=size.vocabulary, min_frequency=2, show_progress=False
        )
        found = {}
        for part, chosen in (("first", texts[:half]), ("second", texts[half:])):
            numbers = torch.cat([torch.tensor(each.ids, dtype=torch.int64) for each in tokenizer.encode_batch(chosen)])
            found[part] = numbers[: len(numbers) // size.length * size.length].view(-1, size.length)
        torch.save(found, file)
    return torch.load(file, weights_only=True)


def new_model(options: argparse.Namespace) -> transformers.LlamaForCausalLM:
    size = SIZES[options.size]
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=size.layers, hidden_size=size.width, intermediate_size=size.width * 11 // 4,
        vocab_size=size.vocabulary, num_attention_heads=size.heads, max_position_embeddings=size.length,
        use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def with_adapters(options: argparse.Namespace) -> Any:
    """The model of the run `plain`, frozen, in bfloat16 on GPUs, with float32 adapters at all linear layers."""
    from peft import LoraConfig, get_peft_model

    model: Any = new_model(options)
    model.load_state_dict(torch.load(options.output / "plain.pt", weights_only=True))
    torch.manual_seed(1)
    model = model.bfloat16() if ON_GPUS else model
    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")).to(DEVICE)


Optimizer = Callable[[torch.nn.Module, float], torch.optim.Optimizer]


def torch_adamw(model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


def adamw(model: torch.nn.Module, lr: float, bits: int = 32) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return bmt.optim.AdamOptimizer(trained, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, state_bits=bits)


def adamw_8bit(model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    return adamw(model, lr, bits=8)


def muon(model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    return bmt.optim.MuonOptimizer(model, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, adjust_lr_fn="match_rms_adamw")


def train(
    options: argparse.Namespace, model: Any, make: Optimizer, part: str, lr: float, *, ranks: int, autocast: bool
) -> dict:
    """Train with a one-cycle schedule and clipping: the same lines for each model and optimizer.

    Returns:
        The losses of all steps, held-out losses with their steps, and the seconds that it took.
    """
    rank = int(os.environ.get("RANK", "0"))
    every_row = tokens(options)[part]
    held_out = every_row[::20][:HELD_OUT].to(DEVICE)
    training = every_row[torch.arange(len(every_row)) % 20 != 0].to(DEVICE)
    rows = SIZES[options.size].rows
    optimizer = make(model, lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, lr, total_steps=options.steps + 1, pct_start=0.05, cycle_momentum=False
    )
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(0))
    chosen = order.repeat(1 + options.steps * rows // len(order)).split(rows)
    losses, begin = [], time.perf_counter()
    points = [(0, evaluate(model, held_out, autocast))]
    for step in range(1, options.steps + 1):
        ids = training[chosen[step - 1][rank::ranks].to(DEVICE)]
        loss = loss_of(model, ids, autocast)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step % EVERY == 0:
            points.append((step, evaluate(model, held_out, autocast)))
    values = torch.stack(losses).float()
    if ranks > 1:  # each rank has the mean of its own rows
        torch.distributed.all_reduce(values)
    return {
        "losses": (values / ranks).tolist(), "held_out": points, "seconds": time.perf_counter() - begin,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }  # fmt: skip


def loss_of(model: Any, ids: torch.Tensor, autocast: bool) -> torch.Tensor:
    # One autocast per forward: while it is entered, it caches the weights in bfloat16 and misses their updates.
    with torch.autocast("cuda", torch.bfloat16) if autocast else contextlib.nullcontext():
        return model(input_ids=ids, labels=ids).loss


@torch.no_grad()
def evaluate(model: Any, rows: torch.Tensor, autocast: bool) -> float:
    return torch.stack([loss_of(model, ids, autocast).float() for ids in rows.split(64)]).mean().item()


# One process of plain torch, and two of FSDP2 and of hf_bmtrain. On GPUs plain torch computes in bfloat16 by autocast
# with float32 weights, and FSDP2 with its mixed precision; hf_bmtrain has bfloat16 weights with float32 masters.


def plain(options: argparse.Namespace) -> dict:
    model: Any = new_model(options)
    model.to(DEVICE)
    run = train(options, model, torch_adamw, "first", SIZES[options.size].lr, ranks=1, autocast=ON_GPUS)
    torch.save(model.state_dict(), options.output / "plain.pt")
    return run


def fsdp2(options: argparse.Namespace) -> dict:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.distributed.init_process_group("nccl" if ON_GPUS else "gloo")
    if ON_GPUS:
        torch.cuda.set_device(DEVICE)
    mesh = torch.distributed.init_device_mesh(DEVICE.type, (2,))
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if ON_GPUS else MixedPrecisionPolicy()
    model: Any = new_model(options)
    model.to(DEVICE)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    return train(options, model, torch_adamw, "first", SIZES[options.size].lr, ranks=2, autocast=False)


def sharded(options: argparse.Namespace, make: Optimizer = adamw, **how: Any) -> dict:
    bmt.init_distributed(seed=0)
    model: Any = new_model(options)
    model = bmt.auto_wrap(model.to(DEVICE, torch.bfloat16) if ON_GPUS else model, use_checkpoint=False, **how)
    return train(options, model, make, "first", SIZES[options.size].lr, ranks=2, autocast=False)


def plain_lora(options: argparse.Namespace) -> dict:
    return train(options, with_adapters(options), torch_adamw, "second", 1e-3, ranks=1, autocast=False)


def nf4_lora(options: argparse.Namespace) -> dict:
    bmt.init_distributed(seed=0)
    model = bmt.auto_wrap(with_adapters(options), use_checkpoint=False, quantize_frozen="nf4")
    return train(options, model, torch_adamw, "second", 1e-3, ranks=2, autocast=False)


RUNS: dict[str, Callable[[argparse.Namespace], dict]] = {
    "plain": plain,
    "FSDP2": fsdp2,
    "sharded": sharded,
    "zero_level=2": lambda options: sharded(options, zero_level=2),
    "float8": lambda options: sharded(options, float8=True),
    "state_bits=8": lambda options: sharded(options, adamw_8bit),
    "Muon": lambda options: sharded(options, muon),
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
