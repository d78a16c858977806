"""Whole weights in and out of a sharded model, under Hugging Face's own keys."""

import pytest
import torch
import transformers

import hf_bmtrain as bmt
from cases import full, in_full, pairwise
from ranks import on_ranks
from state_dicts import check_equal, same_storage
from tiny_models import FAMILIES, batch, build
from twins import Tower, ids


@pytest.mark.parametrize(
    ("family", "tied"),
    pairwise([("llama", True), ("mixtral", False)], list(FAMILIES), [False, True]),
)
@on_ranks(2)
def test_round_trip(family, tied, folder):
    """Equal keys, values and ties; another model's weights load; save_pretrained opens with from_pretrained."""
    plain, other = build(family, tied), build(family, tied, seed=1)
    model = bmt.auto_wrap(build(family, tied))
    state = model.state_dict()
    check_equal(state, plain.state_dict())
    assert same_storage(state) == same_storage(plain.state_dict())
    assert not any(isinstance(value, torch.nn.Parameter) for value in state.values())
    model.load_state_dict(other.state_dict())
    check_equal(model.state_dict(), other.state_dict())
    inputs = batch(family, seed=5)
    torch.testing.assert_close(model(**inputs).loss, other(**inputs).loss)
    state = model.state_dict()
    if bmt.rank() == 0:
        model.save_pretrained(folder, state_dict=state)
        reopened = type(other).from_pretrained(folder)
        check_equal(reopened.state_dict(), other.state_dict())
    bmt.synchronize()


def loading_between_steps():
    """A load takes effect at once, also on blocks that are left whole."""
    model, twin = bmt.auto_wrap(Tower()), Tower()
    model(ids(0, 0))
    halved = {name: value / 2 for name, value in twin.state_dict().items()}
    model.load_state_dict(halved)
    twin.load_state_dict(halved)
    torch.testing.assert_close(model(ids(1, 0)), twin(ids(1, 0)))


def wrong_states():
    model = bmt.auto_wrap(Tower())
    state = Tower().state_dict()
    with pytest.raises(RuntimeError, match=r"embedding.weight.*\(11, 6\).*\(5, 6\)"):
        model.load_state_dict({**state, "embedding.weight": torch.zeros(5, 6)})
    with pytest.raises(RuntimeError, match=r"layers.1.linear.weight.*belongs to this model"):
        model.load_state_dict({**state, "layers.1.linear.weight": torch.zeros(3)})
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({name: value for name, value in state.items() if "head" not in name})
    with pytest.raises(RuntimeError, match="assign=False"):
        model.load_state_dict(state, assign=True)
    with pytest.raises(ValueError, match="the full shape"):
        model.head.weight.take(torch.zeros(3))


def one_rank_only():
    """`state_dict` on rank 0 alone names the rank that is missing instead of hanging."""
    world = bmt.current_world()
    if bmt.rank() == 0:
        with pytest.raises(RuntimeError, match=r"'state_dict' needs every rank(.|\n)*1"):
            world.barrier("state_dict", seconds=1)


def parts():
    """A submodule's state_dict is whole too, be it a block, a list or a module outside."""
    model, plain = bmt.auto_wrap(build("llama")), build("llama")
    for path in ("model", "model.layers", "model.layers.1", "lm_head", "model.embed_tokens"):
        check_equal(model.get_submodule(path).state_dict(), plain.get_submodule(path).state_dict())


def arguments_by_position():
    """Torch still takes destination, prefix and keep_vars by position, and warns."""
    plain, model = Tower(), bmt.auto_wrap(Tower())
    for given in ((None, "x."), ({"other": 1},), ({}, "x.", False)):
        found = []
        for each in (model, plain):
            with pytest.warns(FutureWarning, match="Positional args are being deprecated"):
                found.append(each.state_dict(*given if given[0] is None else (dict(given[0]), *given[1:])))
        mine, expected = found
        assert mine.pop("other", None) == expected.pop("other", None)
        check_equal(mine, expected)


CASES = [loading_between_steps, wrong_states, parts, arguments_by_position]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("size", [2, *in_full(1)])
def test_state(world, size, case):
    world(size)(case)


def test_one_rank_only(world):
    from ranks import Ranks

    ranks = Ranks(2)
    ranks(one_rank_only)
    ranks.stop()


@full
@on_ranks(3, full=(1,))
def test_memory():
    """Every rank holds 1/N of the weights."""
    model = bmt.auto_wrap(build("llama"))
    held = sum(parameter.part.numel() for parameter in model.parameters())
    whole = sum(parameter.numel() for parameter in build("llama").parameters())
    assert bmt.gather_result(torch.tensor([held])).sum() == whole
    assert all(p.full_shape == q.shape for p, q in zip(model.parameters(), build("llama").parameters()))
    assert isinstance(model, transformers.LlamaForCausalLM)
