"""A later auto_wrap, after parameters were added: options that differ from the first call's are refused."""

import pytest
import torch
from torch import nn

import hf_bmtrain as bmt
from cases import needs_peft
from ranks import on_ranks
from tiny_models import VOCABULARY
from twins import WIDTH, Tower, ids
from zoo_families import FAMILIES

OTHERS = [
    {"mlp_chunks": 2},
    {"quantize_frozen": "nf4"},
    {"keep_frozen": True},
    {"zero_level": 2},
    {"use_checkpoint": False},
    {"use_checkpoint": "auto"},
    {"compile": "eager"},
    {"offload_activations": True},
    {"sequence_parallel": 2},
    {"keep": ["down_proj"]},
    *([] if torch.__version__ < "2.7" else [{"compile": True, "cuda_graphs": True}]),  # graphs need torch 2.7
    {"mlp_chunks": 2, "zero_level": 2},
]


def added(**first):
    """A wrapped llama to which a parameter was added, in a module around it."""
    model = FAMILIES["llama"].build()
    model = bmt.auto_wrap(model, **first)
    model.scale = nn.Parameter(torch.ones(3))
    return nn.ModuleDict({"inner": model})


def check_refused(model, first, later):
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match="in the first call") as caught:
        bmt.auto_wrap(model, **later)
    for name, value in later.items():
        assert f"{name}={first[name]!r}" in str(caught.value), caught.value
        assert f"{name}={value!r}" in str(caught.value), caught.value
    assert all(p is before[name] for name, p in model.named_parameters())


DEFAULTS = {
    "mlp_chunks": 1, "quantize_frozen": None, "keep_frozen": "auto", "zero_level": 3, "use_checkpoint": True,
    "compile": False, "offload_activations": False, "sequence_parallel": 1, "keep": [], "cuda_graphs": False,
}  # fmt: skip


@on_ranks(2, full=(1,))
def test_other_options_are_refused():
    model = added()
    for later in OTHERS:
        check_refused(model, DEFAULTS, later)
    bmt.auto_wrap(model, use_checkpoint=True, mlp_chunks=1, keep=())
    assert isinstance(model["inner"].scale, bmt.DistributedParameter)


FIRST = {"zero_level": 2, "keep_frozen": True, "mlp_chunks": 2, "offload_activations": True}


@on_ranks(2, full=(1,))
def test_the_same_options_are_accepted():
    model = added(**FIRST)
    check_refused(model, FIRST, {"mlp_chunks": 3})
    check_refused(model, FIRST, {"keep_frozen": False})
    bmt.auto_wrap(model, **FIRST)
    model["inner"].more = nn.Parameter(torch.ones(3))
    check_refused(model, FIRST, {"mlp_chunks": 3})
    bmt.auto_wrap(model)
    assert isinstance(model["inner"].more, bmt.DistributedParameter)


@on_ranks(2)
def test_float8_and_its_kept_layers():
    first = {"float8": True, "keep": ["down_proj"]}
    model = added(**first)
    check_refused(model, first, {"keep": ["q_proj"]})
    bmt.auto_wrap(model, float8="rows", keep=("down_proj",))


@needs_peft
@on_ranks(2)
def test_what_peft_unloads_is_known():
    """The options are those of the model inside PEFT's, which was wrapped with adapters."""
    import peft

    config = peft.LoraConfig(target_modules=["q_proj"])
    model = bmt.auto_wrap(peft.get_peft_model(FAMILIES["llama"].build(), config), mlp_chunks=2)
    model = peft.get_peft_model(model.unload(), config)
    check_refused(model, {"mlp_chunks": 2}, {"mlp_chunks": 4})
    bmt.auto_wrap(model, mlp_chunks=2)
    model(input_ids=ids(0, bmt.rank()) % VOCABULARY).logits.sum().backward()


@on_ranks(2)
def test_other_blocks_are_refused():
    model = bmt.auto_wrap(Tower())
    model.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(
        ValueError,
        match=r"'layers.2' is only in one of two lists: the 3 blocks with which .* the 2 blocks of blocks=\[",
    ):
        bmt.auto_wrap(model, blocks=[*model.layers][:2])
    with pytest.raises(ValueError, match="is not part of this Tower"):
        bmt.auto_wrap(model, blocks=[nn.Linear(2, 2)])
    bmt.auto_wrap(model, blocks=model.layers)
    assert isinstance(model.scale, bmt.DistributedParameter)


@on_ranks(2)
def test_blocks_by_hand():
    """The options of auto_wrap have no effect on CheckpointBlocks that a program has made."""
    model = nn.Sequential(bmt.CheckpointBlock(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 1))
    with pytest.raises(ValueError, match="zero_level=2 would have no effect.*were not made by auto_wrap"):
        bmt.auto_wrap(model, zero_level=2)
    bmt.auto_wrap(model)
