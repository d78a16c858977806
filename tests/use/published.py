"""One program of a document that BMTrain has published, run as it stands: `python published.py DOCUMENT NUMBER`.

A program is the Python blocks from one `init_distributed` to the next. What the documents leave to the reader is
stood in for: a transformer block, a GPT in small, data, a BERT for the model zoo's, `.cuda()` where there is none.
"""

from __future__ import annotations

import functools
import importlib.machinery
import re
import sys
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
CODE_LINE = re.compile(r"(\s|import |class |bmt\.|\)|$)")  # of a document whose fences were lost


def read_blocks(document: Path) -> list[tuple[str, str]]:
    """(language, code) of every block, the import swapped."""
    text = document.read_text("utf-8")
    blocks = FENCE.findall(text) or [("python", code) for code in _unfenced(text)]
    return [(language, code.replace("import bmtrain as bmt", "import hf_bmtrain as bmt")) for language, code in blocks]


def _unfenced(text: str) -> list[str]:
    blocks: list[list[str]] = []
    inside = False
    for line in text.splitlines(keepends=True):
        starts = line.startswith(("import ", "$ ")) and not inside
        inside = CODE_LINE.match(line) is not None and (inside or starts)
        if starts:
            blocks.append([])
        if inside:
            blocks[-1].append(line)
    return ["".join(block) for block in blocks if block]


def programs(document: Path) -> list[list[str]]:
    """The runnable blocks, a list for each program."""
    found: list[list[str]] = []
    for language, code in read_blocks(document):
        if language == "python" or "BertConfig" in code:
            if "init_distributed(" in code:
                found.append([])
            found[-1].append(code)
    return found


def tell(text: str) -> None:
    """In one write, so that two ranks' lines do not mix."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


# -- the quick start's modules ------------------------------------------------------------------------------------


def some_transformer_block() -> type:
    import torch

    class SomeTransformerBlock(torch.nn.Module):
        """Equal in every instance; multiplies by 1 + 2 + 3 where it gets its three arguments."""

        def __init__(self) -> None:
            super().__init__()
            self.gain = torch.nn.Parameter(torch.linspace(0.5, 1.5, 1024))

        def forward(self, x, first, second, third):
            return torch.sin(x * self.gain) * (first + second + third) / 6

    return SomeTransformerBlock


def check_module(model: Any) -> tuple[Any, Any]:
    """Fill what `torch.empty` left open, run forward and backward; the output and every whole gradient."""
    import torch

    import hf_bmtrain as bmt

    sharded = isinstance(model.param, bmt.DistributedParameter)
    with torch.no_grad():
        whole = torch.linspace(-1, 1, 1024)
        model.param.copy_(model.param.take(whole) if sharded else whole)
    output = model()
    output.square().sum().backward()
    gradients = [p.gather_gradient() if sharded else p.grad for p in model.parameters()]
    return output.detach().cpu(), [gradient.cpu() for gradient in gradients]


def run_quick_start(blocks: list[str]) -> None:
    """Every MyModule, original and replaced, computes the same."""
    import torch

    import hf_bmtrain

    namespace: dict[str, Any] = {"SomeTransformerBlock": some_transformer_block(), "bmtrain": hf_bmtrain}
    expected = None
    for code in blocks:
        exec(compile(code, "<published>", "exec"), namespace)
        if "class MyModule" in code:
            results = check_module(namespace["MyModule"]())
            expected = results if expected is None else expected
            torch.testing.assert_close(results, expected)
    assert expected is not None
    tell("modules agree")


# -- the GPT example ----------------------------------------------------------------------------------------------

ITERATIONS, VOCABULARY, LENGTH = 200, 32, 12


def run_gpt(blocks: list[str]) -> None:
    """As printed, `backward()` has no loss, which is told; with it, the loss falls."""
    import pytest
    import torch

    import hf_bmtrain
    from gpt2.model import GPT

    def small(**sizes) -> GPT:
        small_sizes = {"num_layers": 2, "vocab_size": VOCABULARY, "dim_model": 128, "dim_head": 32, "num_heads": 4}
        return GPT(**{**sizes, **small_sizes, "dim_ff": 256, "max_distance": LENGTH})

    losses: list[float] = []

    def iterations(count: int):
        assert count == 1000
        for number in range(ITERATIONS):
            namespace.update(counting(number, hf_bmtrain.rank(), device))
            yield number
            losses.append(namespace["global_loss"])

    namespace: dict[str, Any] = {"bmtrain": hf_bmtrain, "torch": torch, "GPT": small, "range": iterations}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    *setup, loop = blocks
    for code in setup:
        exec(compile(code, "<published>", "exec"), namespace)
    with pytest.raises(ValueError, match="needs the loss. Call manager.backward"):
        exec(compile(loop, "<published>", "exec"), namespace)
    losses.clear()
    exec(compile(loop.replace("backward()", "backward(loss)"), "<published>", "exec"), namespace)
    assert len(losses) == ITERATIONS
    tell(f"losses {losses[0]} {losses[-1]}")
    assert losses[-1] < 1.0 < 3.4 < losses[0], losses  # from ln 32


def counting(step: int, rank: int, device) -> dict[str, Any]:
    """Rows that count up from a random number; targets are the next number, nothing counts beyond the length."""
    import torch

    generator = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(VOCABULARY, (8, 1), generator=generator)
    rows = (starts + torch.arange(LENGTH + 1)) % VOCABULARY
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (8,), generator=generator)
    targets = rows[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths[:, None], -100)
    batch = {"enc_input": rows[:, :-1].contiguous(), "enc_length": lengths, "targets": targets.contiguous()}
    return {name: value.to(device) for name, value in batch.items()}


# -- the BERT quick start -----------------------------------------------------------------------------------------


ROWS = 32


def questions(path, split, rank, world_size, tokenizer, max_encoder_length):
    """The answer is yes where the first token is 1."""
    import torch

    import hf_bmtrain as bmt

    generator = torch.Generator().manual_seed(world_size * len(split) + rank)
    ids = torch.randint(1, 32, (ROWS, 6), generator=generator)
    ids[::2, 0] = 1
    ids = ids.to(bmt.current_world().device)  # the model zoo's loader gives batches on the device
    rows = [(row, torch.ones_like(row), (row[0] == 1).long()) for row in ids]
    return [dict(zip(("input_ids", "attention_mask", "labels"), row)) for row in rows]


def accuracy_score(truth, predicted):
    return sum(a == b for a, b in zip(truth, predicted, strict=True)) / len(truth)


def use_model_center() -> None:
    """Make ModelCenter's own package, which must be installed, small and independent of its files."""
    import hf_bmtrain as bmt

    bmt.install_as_bmtrain()
    for name in ("sklearn", "sklearn.metrics"):
        module = sys.modules[name] = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)  # torch looks for it
        vars(module).update(accuracy_score=accuracy_score)
    from model_center.dataset.bertdataset import DATASET
    from model_center.model import Bert, BertConfig
    from model_center.tokenizer import BertTokenizer

    def small(*args, **kwargs):
        sizes = {"vocab_size": 32, "dim_model": 16, "num_heads": 2, "dim_head": 8, "dim_ff": 32, "num_layers": 2}
        return BertConfig(**sizes, position_size=16, dropout_p=0.0)

    def initialised(name):
        model = Bert(small())
        bmt.init_parameters(model)
        return model

    BertConfig.from_pretrained = BertConfig.from_json_file = staticmethod(small)
    Bert.from_pretrained = staticmethod(initialised)
    BertTokenizer.from_pretrained = staticmethod(lambda name: name)
    DATASET["BoolQ"] = questions


def model_zoo() -> dict[str, types.ModuleType]:
    """Modules of the model zoo's names over a tiny Hugging Face BERT, and a metric's."""
    import torch
    import transformers

    import hf_bmtrain as bmt

    class BertConfig(transformers.BertConfig):
        dim_model = property(lambda self: self.hidden_size)

        @classmethod
        def from_pretrained(cls, name, *args, **kwargs):
            return cls(
                vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
                hidden_dropout_prob=0.0,
            )  # fmt: skip

        @classmethod
        def from_json_file(cls, path):
            assert path == "your/path/to/config.json"
            return cls.from_pretrained("")

    class Bert:
        def __new__(cls, config):
            return bmt.auto_wrap(transformers.BertModel(config))

        @classmethod
        def from_pretrained(cls, name):
            return cls(BertConfig.from_pretrained(name))

    def loader(dataset, batch_size, shuffle):
        return torch.utils.data.DataLoader(dataset, batch_size=min(batch_size, 8), shuffle=shuffle)

    tokenizer = types.SimpleNamespace(from_pretrained=lambda name: name)
    contents = {
        "model_center.model": {"Bert": Bert, "BertConfig": BertConfig},
        "model_center.layer": {"Linear": bmt.nn.Linear},
        "model_center.dataset": {"DistributedDataLoader": loader},
        "model_center.dataset.bertdataset": {"DATASET": {"BoolQ": questions}},
        "model_center.tokenizer": {"BertTokenizer": tokenizer},
        "sklearn.metrics": {"accuracy_score": accuracy_score},
        "model_center": {},
        "sklearn": {},
    }
    modules = {name: types.ModuleType(name) for name in contents}
    for name, attributes in contents.items():
        modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)  # torch looks for it
        vars(modules[name]).update(attributes)
    return modules


def run_bert(blocks: list[str], real: bool) -> None:
    """real: with ModelCenter's own package, whose loader deals the rows to the ranks, in place of a stand-in."""
    if real:
        use_model_center()
    else:
        sys.modules.update(model_zoo())
    namespace: dict[str, Any] = {}
    for code in blocks:
        alone = "from_json_file" in code  # an alternative to the model before it, which goes on being trained
        if alone:
            code = "import hf_bmtrain as bmt\nfrom model_center.model import Bert, BertConfig\n" + code
        exec(compile(code, "<published>", "exec"), {} if alone else namespace)
    tell(f"answers {len(namespace['pd'])}")
    rows = ROWS if real else ROWS * namespace["bmt"].world_size()
    assert len(namespace["pd"]) == len(namespace["gt"]) == rows


def main(document: str, number: str, zoo: str = "stand-in") -> None:
    import torch

    torch.set_num_threads(1)
    blocks = programs(Path(document))[int(number)]
    text = "".join(blocks)
    bert = functools.partial(run_bert, real=zoo == "model_center")
    run = bert if "model_center" in text else run_gpt if "GPT(" in text else run_quick_start
    with nullcontext() if torch.cuda.is_available() else mock.patch.object(torch.Tensor, "cuda", stay_on_cpu):
        run(blocks)


def stay_on_cpu(tensor: Any, *args: object, **kwargs: object) -> Any:
    return tensor


if __name__ == "__main__":
    main(*sys.argv[1:])
