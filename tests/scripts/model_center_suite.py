"""ModelCenter's models over hf_bmtrain: `python tests model_center_suite CHECKOUT [FAMILY ...]` prints a table.

CHECKOUT is a folder with ModelCenter's source, which this repository does not contain; of its requirements only torch
and transformers are used. Every family's model, small and in float32, runs on the CPU with one rank and with two. The
truth is the same model in one process in which `bmtrain` is torch.nn by other names.
"""

from __future__ import annotations

import functools
import inspect
import json
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

ROWS, TOKENS, VOCABULARY = 4, 12, 61
SECONDS = 180
SMALL = {
    "vocab_size": VOCABULARY, "dim_model": 32, "num_heads": 4, "dim_head": 8, "dim_ff": 48, "num_layers": 3,
    "dropout_p": 0.0, "half": False,
}  # fmt: skip
PAIR = {"num_encoder_layers": 2, "num_decoder_layers": 3}
STEPS = "build load forward loss backward train state_dict save reload cache inspect".split()

Tensors = dict[str, Any]
"""Tensors by name; None for a gradient that there is not."""


# -- the models and what they read --------------------------------------------------------------------------------


def rows_of_ids() -> torch.Tensor:
    return torch.randint(5, VOCABULARY, (ROWS, TOKENS))


def tokens() -> Tensors:
    return {"input_ids": rows_of_ids(), "length": torch.tensor([12, 9, 12, 5])}


def pooled() -> Tensors:
    return {**tokens(), "output_pooler_output": True}


def segments() -> Tensors:
    return {**pooled(), "token_type_ids": torch.randint(2, (ROWS, TOKENS))}


def two_texts() -> Tensors:
    return {**tokens(), "decoder_input_ids": rows_of_ids(), "decoder_length": torch.tensor([12, 7, 11, 12])}


def prompts() -> Tensors:
    positions, types_of_tokens = torch.arange(TOKENS).repeat(ROWS, 1), torch.randint(2, (ROWS, TOKENS))
    inputs = {**tokens(), "position_ids": positions, "token_type_ids": types_of_tokens}
    inputs["input_ids"][:, :4] %= 6
    return inputs


def blanks() -> Tensors:
    ids = rows_of_ids()
    ids[:, 3], ids[:, 8] = 3, 1  # the blank, and where its text starts
    return {"input_ids": ids}


def windows() -> Tensors:
    mask = torch.arange(TOKENS) < tokens()["length"][:, None]
    ends = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    ends[:, 0] = 1
    inputs = {"input_ids": rows_of_ids(), "attention_mask": mask.long(), "global_attention_mask": ends}
    return {**inputs, "token_type_ids": torch.randint(2, (ROWS, TOKENS)), "return_logits": True}


def images() -> Tensors:
    return {"input_seq": torch.randn(ROWS, 3, 8, 8)}


BLANKS = {"sop_tok_id": 1, "eop_tok_id": 2, "mask_tok_id": 3}
PROMPTS = {"prompt_types": 2, "prompt_length": 4, "segment_types": 2}
IMAGE = {"img_size": 8, "patch_size": 4, "num_classes": 7, "hidden_size": 32, "num_layers": 3, "num_heads": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any], Callable[[], Tensors]]] = {
    "Bert": ("BertConfig", SMALL, segments),
    "Roberta": ("RobertaConfig", SMALL, pooled),
    "GPT2": ("GPT2Config", SMALL, tokens),
    "GPTj": ("GPTjConfig", SMALL | {"pos_rotary_dim": 4}, tokens),
    "T5": ("T5Config", SMALL | PAIR, two_texts),
    "CPM1": ("CPM1Config", SMALL, tokens),
    "CPM2": ("CPM2Config", SMALL | PAIR, two_texts),
    "CPM3": ("CPM3Config", SMALL | PROMPTS, prompts),
    "GLM": ("GLMConfig", SMALL | BLANKS, blanks),
    "Longformer": ("LongformerConfig", SMALL | {"attention_window": 4}, windows),
    "ViT": ("VitConfig", IMAGE | {"mlp_size": 48, "half": False}, images),
    "OPT": ("OPTConfig", SMALL, tokens),
    "Llama": ("LlamaConfig", SMALL, tokens),
}
"""Name of the model's class: the configuration's class, its sizes, and what makes a batch."""


def build(name: str) -> nn.Module:
    import model_center.model

    config, sizes, _ = FAMILIES[name]
    known = inspect.signature(getattr(model_center.model, config)).parameters
    sizes = {key: value for key, value in sizes.items() if key in known}
    model = getattr(model_center.model, name)
    parts = vars(sys.modules[model.__module__])
    for layer in {"Linear", "LayerNorm"} & parts.keys():  # some are float16 where the configuration asks for float32
        parts[layer] = functools.partial(parts[layer], dtype=torch.float32)
    return model(getattr(model_center.model, config)(**sizes))


def predict(model: nn.Module, inputs: Tensors) -> Tensors:
    outputs = model(**inputs)
    if isinstance(outputs, torch.Tensor):
        return {"logits": outputs}
    return {key: value for key, value in outputs.items() if isinstance(value, torch.Tensor)}


def loss_of(outputs: Tensors, targets: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(outputs["logits"].flatten(0, -2), targets.flatten())
    return loss + outputs["pooler_output"].square().mean() if "pooler_output" in outputs else loss


def predict_in_two_parts(model: nn.Module, inputs: Tensors) -> Tensors | None:
    """Logits of the last tokens, with the keys and values of the first ones cached; None without such a cache."""
    if "use_cache" not in inspect.signature(model.forward).parameters or "position_ids" in inputs:
        return None
    decoder = "decoder_" if "decoder_input_ids" in inputs else ""
    ids, cut, past = inputs[f"{decoder}input_ids"], TOKENS - 4, None
    whole = {key: value for key, value in inputs.items() if "token_type" not in key}
    if "length" in whole:
        whole["length"] = torch.full_like(whole["length"], TOKENS)
    with torch.no_grad():
        for first, last in ((0, cut), (cut, TOKENS)):
            part = {f"{decoder}input_ids": ids[:, first:last], f"{decoder}length": torch.full((len(ids),), last)}
            outputs = model(**whole | part, use_cache=True, past_key_values=past)
            past = outputs.past_key_values
    return {"logits": outputs.logits}


# -- the truth ----------------------------------------------------------------------------------------------------


class PlainList(nn.ModuleList):
    """The forward of BMTrain's TransformerBlockList."""

    def forward(self, hidden, *args):
        for layer in self:
            hidden = layer(hidden, *args)
        return hidden


def plain_bmtrain() -> types.ModuleType:
    """What ModelCenter's models take from bmtrain, in plain torch."""
    module = types.ModuleType("bmtrain")
    module.__dict__.update(
        DistributedModule=nn.Module,
        DistributedParameter=lambda data, requires_grad=True, init_method=None: nn.Parameter(data, requires_grad),
        ParameterInitializer=lambda *args, **kwargs: None,
        CheckpointBlock=lambda layer: layer,
        TransformerBlockList=PlainList,
        store=types.SimpleNamespace(
            _save_to_rank0=lambda model, destination, prefix: nn.Module.state_dict(
                model, destination=destination, prefix=prefix
            )
        ),
    )
    return module


def record_truth(names: list[str], folder: Path) -> None:
    """Weights, a batch, and what one step of SGD on it gives, a file for each family."""
    sys.modules["bmtrain"] = plain_bmtrain()
    for name in names:
        torch.manual_seed(0)
        model, inputs = build(name), FAMILIES[name][2]()
        for parameter in model.parameters():
            nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0.0, 0.2)
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        outputs = predict(model, inputs)
        targets = torch.randint(outputs["logits"].shape[-1], outputs["logits"].shape[:-1])
        loss = loss_of(outputs, targets)
        loss.backward()
        gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        with torch.no_grad():
            outputs_after = predict(model, inputs)
        truth = {
            "weights": weights, "inputs": inputs, "targets": targets, "loss": loss.detach(), "gradients": gradients,
            "outputs": {key: value.detach() for key, value in outputs.items()}, "trained": model.state_dict(),
            "outputs_after": outputs_after, "cached": predict_in_two_parts(model, inputs),
        }  # fmt: skip
        torch.save(truth, folder / f"{name}.truth")
        torch.save(weights, folder / f"{name}.pt")


# -- the ranks ----------------------------------------------------------------------------------------------------


def differences(found: Tensors, wanted: Tensors) -> list[str]:
    """What is missing, not wanted, or off by more than rounding."""
    errors = [f"{key} is missing" for key in wanted if key not in found]
    errors += [f"{key} is not wanted" for key in found if key not in wanted]
    for key in found.keys() & wanted.keys():
        mine, other = found[key], wanted[key]
        if mine is None or other is None:
            errors += [f"{key} is {mine}, not {other}"] if mine is not other else []
        elif mine.shape != other.shape or mine.dtype != other.dtype:
            errors.append(f"{key} has shape {tuple(mine.shape)} and {mine.dtype}")
        elif not torch.allclose(mine, other, rtol=1e-4, atol=1e-7 + 1e-5 * other.abs().max().item()):
            errors.append(f"{key} differs by {(mine - other).abs().max():.2g}")
    return errors


def check(name: str, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Take one family through all steps, on every rank; yield each step and this rank's differences."""
    import bmtrain as bmt
    from model_center.utils import print_inspect

    def mine(values: Tensors) -> Tensors:
        cut = {
            key: value.chunk(bmt.world_size())[bmt.rank()] for key, value in values.items() if torch.is_tensor(value)
        }
        return values | cut

    truth = torch.load(folder / f"{name}.truth")
    inputs, first = mine(truth["inputs"]), bmt.rank() == 0
    model = build(name)
    bmt.init_parameters(model)
    shapes = {key: torch.zeros(parameter.full_shape) for key, parameter in model.named_parameters()}
    yield "build", differences(shapes, {key: torch.zeros(value.shape) for key, value in truth["weights"].items()})
    bmt.load(model, str(folder / f"{name}.pt"))
    full_params = {key: parameter.gather().detach() for key, parameter in model.named_parameters()}
    yield "load", differences(full_params, truth["weights"])
    outputs = predict(model, inputs)
    yield "forward", differences(outputs, mine(truth["outputs"]))
    loss = loss_of(outputs, mine({"targets": truth["targets"]})["targets"])
    yield "loss", differences({"loss": bmt.sum_loss(loss).detach()}, {"loss": truth["loss"]})
    loss.backward()
    gradients = {key: parameter.gather_gradient() for key, parameter in model.named_parameters()}
    yield "backward", differences(gradients, truth["gradients"])
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    full_params = {key: parameter.gather().detach() for key, parameter in model.named_parameters()}
    yield "train", differences(full_params, truth["trained"])
    own, around = model.state_dict(), nn.ModuleDict({"inner": model}).state_dict()
    errors = differences(own, truth["trained"]) if first else [f"{key} is on rank 1" for key in own]
    inner = {f"inner.{key}": value for key, value in truth["trained"].items()}
    yield "state_dict", errors + differences(dict(around), inner)
    file = folder / f"{name}-{bmt.world_size()}.pt"
    bmt.save(model, str(file))
    yield "save", differences(torch.load(file), truth["trained"])
    fresh = build(name)
    bmt.load(fresh, str(file), strict=False)
    with torch.no_grad():
        yield "reload", differences(predict(fresh, inputs), mine(truth["outputs_after"]))
    cached = predict_in_two_parts(fresh, inputs)
    if cached is not None:
        yield "cache", differences(cached, mine(truth["cached"]))
    lines = bmt.inspect.inspect_model(model, "*")
    print_inspect(model, "*bias")
    means = {key: value.mean() for key, value in truth["trained"].items()}
    yield "inspect", differences({line["name"]: torch.tensor(line["mean"]) for line in lines}, means)


def check_all(names: list[str], folder: Path) -> None:
    """Rank 0 writes what failed in each step of each family, "" where nothing did."""
    import hf_bmtrain

    hf_bmtrain.install_as_bmtrain()
    hf_bmtrain.init_distributed(seed=0, timeout=60)
    for name in names:
        results: dict[str, str] = {}
        steps = check(name, folder)
        while True:
            try:
                step, errors = next(steps)
            except StopIteration:
                break
            except Exception as error:
                step, errors = STEPS[min(len(results), len(STEPS) - 1)], [f"{type(error).__name__}: {error}"]
            every = enumerate(hf_bmtrain.store.allgather_objects(errors))
            results[step] = "; ".join([f"rank {rank}: {error}" for rank, own in every for error in own][:3])
        if hf_bmtrain.rank() == 0:
            (folder / f"{name}-{hf_bmtrain.world_size()}.json").write_text(json.dumps(results))


def run_role(role: str, checkout: str, folder: str, names: list[str]) -> None:
    """One process of `examine`."""
    sys.path.insert(0, checkout)
    sys.modules.setdefault("requests", types.ModuleType("requests"))  # its downloads are not used
    torch.set_num_threads(1)
    for function in (torch.arange, torch.zeros):  # ModelCenter's positions are on "cuda"
        setattr(torch, function.__name__, on_cpu(function))
    {"truth": record_truth, "check": check_all}[role](names, Path(folder))


def on_cpu(function: Callable) -> Callable:
    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        return function(*args, **kwargs | ({"device": "cpu"} if kwargs.get("device") == "cuda" else {}))

    return wrapped


# -- the table ----------------------------------------------------------------------------------------------------


def examine(checkout: Path, names: list[str], sizes: tuple[int, ...] = (1, 2)) -> dict[tuple[str, int], dict[str, str]]:
    """What failed in each step (a key of STEPS), for each family and number of ranks; "" where nothing did."""
    from processes import environment

    with tempfile.TemporaryDirectory() as folder:
        for role, size in (("truth", 1), *(("check", size) for size in sizes)):
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"] if size > 1 else []
            done = subprocess.run(
                [sys.executable, *launcher, __file__, role, str(checkout), folder, *names], cwd=folder,
                env=environment(ACCELERATE_USE_CPU="true", HF_BMTRAIN_POISON="1", HF_HUB_OFFLINE="1"),
                capture_output=True, text=True, timeout=SECONDS, check=False,
            )  # fmt: skip
            if done.returncode:
                print(
                    f"{role} with {size} ranks failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}", file=sys.stderr
                )
        files = {(name, size): Path(folder, f"{name}-{size}.json") for name in names for size in sizes}
        lost = {"build": "the process ended before this family was done"}
        return {key: json.loads(file.read_text()) if file.is_file() else lost for key, file in files.items()}


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[:1] in (["truth"], ["check"]):
        run_role(*arguments[:3], arguments[3:])
        return 0
    unknown = {*arguments[1:]} - {*FAMILIES}
    if not arguments or unknown or not Path(arguments[0], "model_center").is_dir():
        raise SystemExit(f"usage: python tests model_center_suite CHECKOUT [{' | '.join(FAMILIES)} ...]")
    results = examine(Path(arguments[0]).resolve(), arguments[1:] or list(FAMILIES))
    print(f"{'family':10} ranks {' '.join(STEPS)}")
    failures = 0
    for (name, size), steps in results.items():
        failed = [f"{step}: {why}" for step, why in steps.items() if why]
        failures += bool(failed)
        cells = ["-" if step not in steps else "FAIL" if steps[step] else "ok" for step in STEPS]
        print(f"{name:10} {size:5} {' '.join(cell.ljust(len(step)) for cell, step in zip(cells, STEPS))}".rstrip())
        for line in failed:
            print(f"    {line}")
    return failures


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        raise SystemExit(main())
