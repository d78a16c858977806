"""Record losses, gradient norms and final weights of 30 configurations, bit by bit; compare two records.

`python tests identical record FILE` trains every configuration and writes the bits as JSON;
`python tests identical compare FILE FILE` prints every configuration with "same", or where it begins to differ.
A change that promises unchanged results is recorded before and after, on one machine with one torch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import hf_bmtrain as bmt
from ranks import Ranks
from tiny_models import batch, build, embeddings

STEPS = 4


@dataclass(frozen=True)
class Configuration:
    """ranks: of the world. gather: its way of gathering. The other fields say what is trained, and how."""

    ranks: int
    family: str
    gather: str = "auto"
    zero_level: int = 3
    recompute: bool = True
    optimizer: str = "adam"
    accumulation: int = 1
    clip: float | None = 1.0
    loss_scale: float | None = None
    dtype: str = "float32"
    dropout: float = 0.0
    frozen: bool = False
    tied: bool = False

    def label(self) -> str:
        changed = {name: value for name, value in asdict(self).items() if value != _DEFAULTS.get(name)}
        return " ".join(f"{name}={value}" for name, value in changed.items())


_DEFAULTS = {name: field.default for name, field in Configuration.__dataclass_fields__.items()}

CONFIGURATIONS = [
    Configuration(1, "llama"),
    Configuration(1, "llama", recompute=False, optimizer="sgd"),
    Configuration(1, "gpt2", dropout=0.1, accumulation=2),
    Configuration(1, "bert", dtype="bfloat16", optimizer="offload"),
    Configuration(1, "t5", optimizer="adamw", accumulation=3),
    Configuration(1, "mixtral", zero_level=2, clip=None),
    Configuration(1, "llama", dtype="float16", loss_scale=1024.0, accumulation=2),
    Configuration(1, "gpt2", tied=True, optimizer="linear_loss"),
    Configuration(2, "llama"),
    Configuration(2, "llama", recompute=False, optimizer="sgd", accumulation=2),
    Configuration(2, "llama", zero_level=2, dtype="bfloat16"),
    Configuration(2, "llama", gather="peer", accumulation=2, dtype="bfloat16"),
    Configuration(2, "gpt2", dropout=0.1),
    Configuration(2, "gpt2", tied=True, gather="peer", optimizer="sgd"),
    Configuration(2, "gpt2", frozen=True, zero_level=2, recompute=False),
    Configuration(2, "bert", optimizer="adamw", clip=0.1, accumulation=3),
    Configuration(2, "bert", dtype="float16", loss_scale=2.0**14, gather="peer"),
    Configuration(2, "t5", tied=True, optimizer="offload", dtype="bfloat16"),
    Configuration(2, "t5", recompute=False, optimizer="adam_bf16_moment"),
    Configuration(2, "mixtral", accumulation=2),
    Configuration(2, "mixtral", gather="peer", frozen=True, optimizer="sgd"),
    Configuration(2, "llama", optimizer="linear_loss", tied=True),
    Configuration(3, "llama", dtype="bfloat16", accumulation=2),
    Configuration(3, "llama", gather="peer"),
    Configuration(3, "gpt2", zero_level=2, recompute=False, dropout=0.1),
    Configuration(3, "gpt2", dtype="float16", loss_scale=256.0, optimizer="offload"),
    Configuration(3, "bert", frozen=True, optimizer="adamw"),
    Configuration(3, "t5", gather="peer", optimizer="sgd", clip=None),
    Configuration(3, "t5", tied=True, accumulation=2),
    Configuration(3, "mixtral", zero_level=2, optimizer="linear_loss"),
]


def train(configuration: Configuration) -> dict[str, Any]:
    """Losses and norms of every step as hexadecimal floats, and a digest of the final weights. Collective."""
    c = configuration
    torch.manual_seed(0)
    model = build(c.family, tied=c.tied, dropout=c.dropout).train().to(getattr(torch, c.dtype))
    if c.frozen:
        for parameter in embeddings(model):
            parameter.requires_grad_(False)
    bmt.auto_wrap(model, zero_level=c.zero_level, use_checkpoint=c.recompute)
    if c.optimizer == "linear_loss":
        bmt.hf.fuse_causal_loss(model)
    optimizer = _optimizer(c.optimizer, model)
    manager = bmt.optim.OptimManager(loss_scale=c.loss_scale)
    manager.add_optimizer(optimizer, bmt.lr_scheduler.Cosine(optimizer, 1e-2, 1, STEPS + 2))
    losses, norms = [], []
    for step in range(STEPS):
        torch.manual_seed(100 * step + bmt.rank())
        manager.zero_grad()
        for micro in range(c.accumulation):
            seed = (step * c.accumulation + micro) * bmt.world_size() + bmt.rank()
            loss = model(**batch(c.family, seed)).loss / c.accumulation
            manager.backward(loss)
            losses.append(loss.float().item().hex())
        if c.clip is not None:
            norms.append(manager.clip_grad_norm(optimizer.param_groups, c.clip).item().hex())
        manager.step()
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    return {"losses": losses, "norms": norms, "weights": digest.hexdigest()}


def _optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
    if name == "offload":
        return bmt.optim.AdamOffloadOptimizer(parameters, lr=1e-2, weight_decay=0.1)
    if name == "adam_bf16_moment":
        return bmt.optim.AdamOptimizer(parameters, lr=1e-2, exp_avg_dtype=torch.bfloat16)
    return bmt.optim.AdamOptimizer(parameters, lr=1e-2, weight_decay=0.1, hold_steps=1)


def record(path: Path) -> None:
    """Train every configuration and write what came out."""
    results: dict[str, list[dict[str, Any]]] = {}
    for world in sorted({(c.ranks, c.gather) for c in CONFIGURATIONS}):
        ranks = Ranks(world[0], gather=world[1])
        for configuration in CONFIGURATIONS:
            if (configuration.ranks, configuration.gather) == world:
                results[configuration.label()] = ranks(train, configuration)
                print(configuration.label(), results[configuration.label()][0]["weights"][:12], flush=True)
        ranks.stop()
    path.write_text(json.dumps(results, indent=1))


def compare(before: Path, after: Path) -> int:
    """Print a line for each configuration; returns how many differ."""
    old, new = json.loads(before.read_text()), json.loads(after.read_text())
    assert old.keys() == new.keys(), "the records are of different configurations"
    differ = 0
    for label in old:
        places = [
            f"rank {rank} {key}"
            for rank, (mine, theirs) in enumerate(zip(old[label], new[label]))
            for key in mine
            if mine[key] != theirs[key]
        ]
        differ += bool(places)
        print(f"{label}: {'same' if not places else 'DIFFERS in ' + ', '.join(places)}")
    print(f"{len(old)} configurations, {differ} differ")
    return differ


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    if options.what == "record":
        record(options.files[0])
        return 0
    return bool(compare(*options.files))
