"""Loss curves in bfloat16 and in float8 of language models that learn real text.

    python tests float8_curves --model llama --output FOLDER             one run in bfloat16
    python tests float8_curves --model llama --float8 --output FOLDER    the same in float8
    python tests float8_curves --plot curves.svg --output FOLDER         a table and a plot of all runs in FOLDER

The text is what Python brings: the sources of its library and of installed packages, in the order of their names. Every
20th row of tokens is held out. Runs of one model differ in float8 alone: they begin with the same weights and see the
same rows in the same order. Both models have more than 100 M parameters.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from pathlib import Path

import torch
import transformers
from tokenizers import ByteLevelBPETokenizer
from tqdm import tqdm

import hf_bmtrain as bmt
from common.curve import Curve

LENGTH, VOCABULARY, EVERY, HELD_OUT = 512, 32768, 20, 256
PACKAGES = ("torch", "transformers", "numpy", "scipy", "sklearn", "pandas")
FOR_TOKENIZER = 8_000_000  # characters


def read_sources(size: int) -> list[str]:
    """The first `size` characters, or all there are, of Python's library and of PACKAGES."""
    library, site = (Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib"))
    folders = [
        (library, "*.py"),
        *((library / each.name, "**/*.py") for each in sorted(library.iterdir()) if each.is_dir()),
    ]
    folders = [pair for pair in folders if pair[0].name not in ("site-packages", "dist-packages")]
    folders += [(site / name, "**/*.py") for name in PACKAGES]
    texts: list[str] = []
    for file in (file for folder, pattern in folders for file in sorted(folder.glob(pattern))):
        texts.append(file.read_text("utf-8", errors="replace"))
        size -= len(texts[-1])
        if size < 0:
            break
    return texts


def tokens_of(texts: list[str]) -> torch.Tensor:
    """Rows of LENGTH tokens, of a tokenizer that learns from every few texts."""
    tokenizer = ByteLevelBPETokenizer()
    stride = max(1, sum(map(len, texts)) // FOR_TOKENIZER)
    tokenizer.train_from_iterator(texts[::stride], vocab_size=VOCABULARY, min_frequency=2, show_progress=False)
    numbers = torch.cat([torch.tensor(each.ids, dtype=torch.int64) for each in tokenizer.encode_batch(texts)])
    return numbers[: len(numbers) // LENGTH * LENGTH].view(-1, LENGTH)


def build(name: str, layers: int, width: int, seed: int) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_layer=layers, n_embd=width, n_head=width // 64, n_positions=LENGTH, vocab_size=VOCABULARY,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )  # fmt: skip
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=layers, hidden_size=width, intermediate_size=width * 8 // 3, vocab_size=VOCABULARY,
            num_attention_heads=width // 64, max_position_embeddings=LENGTH, use_cache=False,
        )  # fmt: skip
    device = bmt.current_world().device
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).train()


@torch.no_grad()
def evaluate(model: torch.nn.Module, rows: torch.Tensor, batch: int) -> float:
    losses = [model(input_ids=ids, labels=ids).loss * len(ids) for ids in rows.split(batch)]
    return float(torch.stack(losses).sum() / len(rows))


def train(options: argparse.Namespace) -> dict:
    device = bmt.current_world().device
    rows = tokens_of(read_sources(options.characters))
    held_out, training = rows[::EVERY][:HELD_OUT].to(device), rows[torch.arange(len(rows)) % EVERY != 0].to(device)
    model = build(options.model, options.layers, options.width, options.seed)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size / 1e6:.1f} M parameters, {rows.numel() / 1e6:.1f} M tokens", flush=True)
    model = bmt.auto_wrap(model, use_checkpoint=False, float8=options.float8)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=options.lr, weight_decay=0.1, betas=(0.9, 0.95))
    scheduler = bmt.lr_scheduler.Cosine(optimizer, options.lr, warmup_iter=options.steps // 20, end_iter=options.steps)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer, scheduler)
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(options.seed))
    chosen = order.repeat(1 + options.steps * options.batch // len(order)).split(options.batch)
    curve, points, begin = Curve(), [], time.perf_counter()
    for step in tqdm(range(1, options.steps + 1), disable=None):
        ids = training[chosen[step - 1].to(device)]
        manager.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        manager.backward(loss)
        norm = manager.clip_grad_norm(optimizer.param_groups, 1.0)
        curve.add(1, loss.detach(), norm, scheduler.current_lr)
        manager.step()
        if step % (options.steps // 10) == 0:
            points.append((step, evaluate(model, held_out, options.batch)))
            print(f"step {step}: held out {points[-1][1]:.4f}, {time.perf_counter() - begin:.0f} s", flush=True)
    curve.read()
    kind = "float8" if options.float8 else "bf16"
    return {
        "model": options.model, "seed": options.seed, "kind": kind, "parameters": size,
        "losses": [step["loss"] for step in curve.steps],
        "held_out": points, "tokens": rows.numel(), "seconds": time.perf_counter() - begin,
    }  # fmt: skip


def read_runs(folder: Path) -> dict[str, dict[str, dict]]:
    """The runs in a folder, by model with seed, and by kind."""
    runs: dict[str, dict[str, dict]] = {}
    for file in sorted(folder.glob("*.json")):
        run = json.loads(file.read_text())
        runs.setdefault(f"{run['model']}, seed {run['seed']}", {})[run["kind"]] = run
    return runs


def compare(runs: dict[str, dict[str, dict]]) -> str:
    """A table of held-out losses of both kinds, step by step, and how far float8 is off at the end."""
    lines = []
    for model, kinds in runs.items():
        pairs = list(zip(kinds["bf16"]["held_out"], kinds["float8"]["held_out"], strict=True))
        lines.append(
            f"{model}, {kinds['bf16']['parameters'] / 1e6:.1f} M parameters: step, held-out loss in bf16, float8"
        )
        lines += [f"{step:8d} {bf16:.4f} {float8:.4f}" for (step, bf16), (_, float8) in pairs]
        (_, bf16), (_, float8) = pairs[-1]
        lines.append(f"    at the end {100 * (float8 / bf16 - 1):+.2f} %")
    return "\n".join(lines)


def plot(runs: dict[str, dict[str, dict]], file: Path) -> None:
    """Draw the means of 20 training losses, and the held-out losses as points."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(runs), figsize=(5 * len(runs), 4), layout="constrained", squeeze=False)
    for (model, kinds), own in zip(runs.items(), axes[0]):
        for (kind, run), color in zip(kinds.items(), ("tab:blue", "tab:orange")):
            losses = torch.tensor(run["losses"][: len(run["losses"]) // 20 * 20]).view(-1, 20).mean(1)
            own.plot([20 * (place + 1) for place in range(len(losses))], losses, color=color, label=kind, linewidth=1)
            own.plot(
                *zip(*run["held_out"]), "o", color=color, markersize=4, fillstyle="none", label=f"{kind}, held out"
            )
        own.set(title=f"{model}, {run['parameters'] / 1e6:.0f} M parameters", xlabel="step", ylabel="loss")
        own.legend()
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=("gpt2", "llama"), default="llama")
    parser.add_argument("--float8", action="store_true")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and the order of the rows")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=16, help="rows of 512 tokens")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--characters", type=int, default=60_000_000, help="of text")
    parser.add_argument("--plot", type=Path, help="draw the runs in the output's folder there, and train nothing")
    parser.add_argument("--output", type=Path, default=Path("outputs/float8_curves"))
    options = parser.parse_args()
    if options.plot:
        runs = read_runs(options.output)
        print(compare(runs))
        plot(runs, options.plot)
        return
    bmt.init_distributed(seed=0)
    run = train(options)
    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / f"{run['model']}-{run['seed']}-{run['kind']}.json"
    file.write_text(json.dumps(run) + "\n")


if __name__ == "__main__":
    main()
