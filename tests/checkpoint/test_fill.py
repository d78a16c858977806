"""auto_wrap(model, weights=...) of a model on the meta device is that of the model loaded whole, bit by bit."""

import accelerate
import pytest
import safetensors.torch
import torch
import transformers
from torch import nn

import hf_bmtrain as bmt
from cases import by_default, full, pairwise
from ranks import on_ranks
from state_dicts import same_storage
from tiny_models import batch, build
from zoo_families import FAMILIES as ZOO

FAMILIES = ["llama", "gpt2", "bert", "t5"]
PLACES = {"torch.device": lambda: torch.device("meta"), "init_empty_weights": accelerate.init_empty_weights}


def check_same(model, plain):
    """Names, dtypes, ties, cuts, values and buffers."""
    for (name, one), (other_name, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert name == other_name and one.full_shape == other.full_shape and one.dtype == other.dtype
        assert one.requires_grad == other.requires_grad and one.placement.matches(other.placement), name
        assert torch.equal(one.buffer.shard, other.buffer.shard), name
    for (name, one), (other_name, other) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert name == other_name and one.dtype == other.dtype and torch.equal(one, other), name
    assert same_storage(model.state_dict()) == same_storage(plain.state_dict())


def fills(folder, cls, config, place, inputs, dtype=torch.float32):
    cls = getattr(transformers, cls)
    before = torch.get_rng_state()
    with PLACES[place]():
        model = cls(config).to(dtype)
    model = bmt.auto_wrap(model, weights=folder)
    assert torch.equal(torch.get_rng_state(), before)
    plain = cls(config).to(dtype)
    plain.load_state_dict(cls.from_pretrained(folder).state_dict())
    plain = bmt.auto_wrap(plain)
    check_same(model, plain)
    for either in (model, plain) if inputs else ():
        torch.manual_seed(5)
        optimizer = torch.optim.SGD(either.parameters(), lr=0.1)
        either(**inputs).loss.backward()
        optimizer.step()
    check_same(model, plain)


@pytest.mark.parametrize(
    ("family", "tied", "size", "place"),
    pairwise(
        [("llama", True, 3, "torch.device"), ("t5", False, 2, "init_empty_weights")],
        FAMILIES,
        [False, True],
        [1, 2, 3],
        list(PLACES),
    ),
)
def test_families(world, tmp_path, family, tied, size, place):
    model = build(family, tied=tied)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    world(size)(fills, str(tmp_path), type(model).__name__, model.config, place, batch(family, 0))


@full
def test_another_dtype(world, tmp_path):
    model = build("llama")
    model.save_pretrained(tmp_path)
    world(2)(fills, str(tmp_path), type(model).__name__, model.config, "torch.device", None, torch.bfloat16)


NAMES = ("gemma2", "gpt_neox", "falcon", "vit", "clip", "wav2vec2_conformer", "mamba", "deberta_v2", "whisper")


@full
@pytest.mark.parametrize("name", by_default(NAMES, "gpt_neox"))
def test_zoo_families(world, tmp_path, name):
    if ZOO[name].missing:
        pytest.skip(f"this transformers has no {name}")
    model = ZOO[name].build()
    model.save_pretrained(tmp_path, save_original_format=False)
    world(2)(fills, str(tmp_path), type(model).__name__, model.config, "torch.device", None)


def refused(folder, config):
    with torch.device("meta"):
        model = transformers.GPTNeoXForCausalLM(config)
    expected = (
        r"lack 1 tensors of the model \(lm_head.weight\), and have 1 others \(embed_out.weight\).*"
        r"bmt\.hf\.from_pretrained converts"
    )
    with pytest.raises(RuntimeError, match=expected):
        bmt.auto_wrap(model, weights=folder)


@full
def test_other_names(world, tmp_path):
    """Those of older versions, which save_pretrained writes and from_pretrained converts."""
    model = ZOO["gpt_neox"].build()
    state = model.state_dict()
    state["embed_out.weight"] = state.pop("lm_head.weight")
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    world(2)(refused, str(tmp_path), model.config)


class Plain(nn.Module):
    """No model of Hugging Face: tied weights, an LSTM, a frozen layer, a buffer in the files and one that is not."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.LSTM(4, 4) for _ in range(2))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight
        self.head.bias.requires_grad_(False)
        self.register_buffer("table", torch.arange(3.0), persistent=False)


@on_ranks(2, full=(1,))
def test_plain_models(folder):
    torch.manual_seed(3)
    plain, path = Plain(), f"{folder}/plain.safetensors"
    state = {name: value for name, value in plain.state_dict().items() if name != "head.weight"}
    if bmt.rank() == 0:
        safetensors.torch.save_file(state, path)
        torch.save(plain.state_dict(), f"{folder}/plain.pt")
        safetensors.torch.save_file(
            {**state, "head.weight": state["embedding.weight"] + 1}, f"{folder}/differ.safetensors"
        )
        safetensors.torch.save_file({**state, "more": torch.ones(1)}, f"{folder}/more.safetensors")
        safetensors.torch.save_file({**state, "head.bias": torch.ones(3)}, f"{folder}/shape.safetensors")
        del state["head.bias"]
        safetensors.torch.save_file(state, f"{folder}/less.safetensors")
    bmt.synchronize()
    whole = bmt.auto_wrap(plain)

    def empty(table=True):
        with torch.device("meta"):
            model = Plain()
        model.table = torch.arange(3.0) if table else model.table
        return model

    for name in (path, f"{folder}/plain.pt"):
        check_same(bmt.auto_wrap(empty(), weights=name), whole)
    for name, message in {
        "differ": r"embedding\.weight and head\.weight are tied in the model, but differ in the files",
        "more": r"the files have 1 tensors that are not in the model \(more\)\. The names",
        "shape": r"head\.bias has shape \(3,\) in the files, but \(7,\)",
        "less": r"the files lack 1 tensors of the model \(head\.bias\)\. The names", "nothing": "nothing.safetensors",
    }.items():  # fmt: skip
        with pytest.raises(RuntimeError, match=f"auto_wrap: Plain could not be loaded from .*{message}"):
            bmt.auto_wrap(empty(), weights=f"{folder}/{name}.safetensors")
    with pytest.raises(
        RuntimeError, match=r"1 buffers on the meta device have no values.*\(table\).*init_empty_weights"
    ):
        bmt.auto_wrap(empty(table=False), weights=path)
    with pytest.raises(RuntimeError, match=r"already sharded\. Load the weights with bmt\.load"):
        bmt.auto_wrap(whole, weights=path)
    with pytest.raises(ValueError, match=r"meta device and has no values.*weights=FOLDER"):
        bmt.auto_wrap(empty())
    new = empty()  # a head that the files lack has values of its own
    new.head.bias = nn.Parameter(torch.arange(7.0))
    assert bmt.auto_wrap(new, weights=f"{folder}/less.safetensors").state_dict()["head.bias"].tolist() == [*range(7)]
