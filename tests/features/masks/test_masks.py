"""Attention masks that transformers makes without reading tensors, and those for which it must read them."""

import copy
import functools
import inspect
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import transformers
from accelerate.data_loader import DataLoaderShard
from transformers import LlamaConfig, LlamaForCausalLM, masking_utils

import hf_bmtrain as bmt
from hf_bmtrain.features import masks
from hf_bmtrain.hf.run_ahead.batches import BatchCopies
from host_reads import Reads

LENGTH = 8
CACHE = [*inspect.signature(masking_utils.create_causal_mask).parameters][3]
"""The name of a parameter that a release of transformers changed."""
TOKENS = torch.arange(2 * LENGTH).reshape(2, LENGTH)
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
CONFIGS = {attention: LlamaConfig(attn_implementation=attention) for attention in ("sdpa", "eager")}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def hooked(model):
    """The model with the hooks that it would have on a GPU."""
    masks.Masks().connect(SimpleNamespace(model=model, world=SimpleNamespace(rank=0, device=torch.device("cuda"))))
    return model


def wrapped_as_on_a_gpu(model):
    with mock.patch.object(masks, "_reads_wait", return_value=True):
        return bmt.auto_wrap(model)


# -- models ---------------------------------------------------------------------------------------------------------


def reads_of_a_loop(wrapped):
    """How often masks are made by reading: in training, evaluation, and with packed rows."""
    model = wrapped_as_on_a_gpu(llama()) if wrapped else llama()
    found = []
    with Reads() as counted:
        model(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        found.append(counted.of_masks)
        with torch.no_grad():
            model.eval()(TOKENS, use_cache=False)
        found.append(counted.of_masks)
        packed = model(TOKENS, position_ids=PACKED.expand(2, -1), use_cache=False).logits.detach()
        found.append(counted.of_masks)
    return found, packed


def test_a_loop_reads_only_packed_positions(world) -> None:
    ((found, packed),) = world(1)(reads_of_a_loop, True)
    ((plain, expected),) = world(1)(reads_of_a_loop, False)
    assert found == [0, 0, 1] and plain == [1, 2, 3]
    assert torch.equal(packed, expected)


def added_by_a_second_call():
    def count():
        return sum(masks._is_own(hook) for each in model.modules() for hook in each._forward_pre_hooks.values())

    model = wrapped_as_on_a_gpu(llama())
    before = count()
    model.model.layers[0].mlp.added = torch.nn.Linear(2, 2)
    wrapped_as_on_a_gpu(model)
    return before, count()


def hooks_on_the_cpu():
    return sum(map(masks._is_own, bmt.auto_wrap(llama())._forward_pre_hooks.values()))


def test_there_are_none_on_the_cpu(world) -> None:
    assert world(1)(hooks_on_the_cpu) == [0]


def test_hooks_are_added_once(world) -> None:
    assert world(1)(added_by_a_second_call) == [(2, 2)]


def test_an_unknown_release(caplog) -> None:
    """Its function is left as it is, and one line says so."""

    def other(mask):
        return False, mask

    with mock.patch.object(masking_utils, "_preprocess_mask_arguments", other):
        with caplog.at_level("INFO", "hf_bmtrain"):
            model = hooked(llama())
    assert "does not know how transformers" in caplog.text
    assert not any(map(masks._is_own, model._forward_pre_hooks.values()))


def test_a_copied_model() -> None:
    model = hooked(llama())
    copied = copy.deepcopy(model)
    with Reads() as counted:
        assert torch.equal(copied(TOKENS, use_cache=False).logits, model(TOKENS, use_cache=False).logits)
    assert counted.of_masks == 0


@pytest.mark.skipif(torch.__version__ < "2.7", reason="torch 2.6 cannot compile the forward of transformers' models")
def test_a_compiled_model() -> None:
    before, model = masking_utils._preprocess_mask_arguments, hooked(llama())
    expected = model(TOKENS, use_cache=False).logits
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(TOKENS, use_cache=False).logits, expected)
    assert torch.equal(model(TOKENS, use_cache=False).logits, expected)
    assert masking_utils._preprocess_mask_arguments is before


def test_a_forward_that_fails_restores_the_function() -> None:
    before, model = masking_utils._preprocess_mask_arguments, hooked(llama())
    with pytest.raises(IndexError):
        model(torch.tensor([[99]]))
    assert masking_utils._preprocess_mask_arguments is before


def test_a_forward_that_is_interrupted() -> None:
    """torch calls no hooks then. Nothing else may notice, and the next forward restores the function."""
    before, model = masking_utils._preprocess_mask_arguments, hooked(llama())
    beside = LlamaForCausalLM(model.config)
    expected = beside(TOKENS, position_ids=PACKED, use_cache=False).logits
    with mock.patch.object(model.model.norm, "forward", side_effect=KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            model(TOKENS, use_cache=False)
    assert torch.equal(beside(TOKENS, position_ids=PACKED, use_cache=False).logits, expected)
    model(TOKENS, use_cache=False)
    assert masking_utils._preprocess_mask_arguments is before


def test_forwards_that_end_in_the_order_in_which_they_began() -> None:
    before, (first, second) = masking_utils._preprocess_mask_arguments, (llama().model, llama().model)
    hooks = [masks._Forward(before), masks._Forward(before)]
    for hook, model in zip(hooks, (first, second)):
        hook.begin(model, (), {})
    for hook, model in zip(hooks, (first, second)):
        hook.end(model, (), None)
    assert masking_utils._preprocess_mask_arguments is before


def by_hook(model):
    model.model.register_forward_pre_hook(
        lambda *given: (given[1], given[2] | {"position_ids": PACKED}), with_kwargs=True
    )


def by_attribute(model):
    forward = model.model.forward
    model.model.forward = functools.wraps(forward)(lambda **given: forward(**given | {"position_ids": PACKED}))


def by_class(model):
    forward = type(model.model).forward

    @functools.wraps(forward)
    def packed(self, **given):
        return forward(self, **given | {"position_ids": PACKED})

    model.model.__class__ = type("Packed", (type(model.model),), {"forward": packed})


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("pack", [by_hook, by_attribute, by_class])
def test_packed_positions_that_a_program_adds_are_read(pack, late) -> None:
    model = llama()
    pack(model)
    plain = model(TOKENS, use_cache=False).logits
    if late:
        model = hooked(llama())
        pack(model)
    else:
        hooked(model)
    assert torch.equal(model(TOKENS, use_cache=False).logits, plain)


# -- masks ----------------------------------------------------------------------------------------------------------


def causal_mask(mask, attention="sdpa", positions=None):
    config = CONFIGS[attention]
    return masking_utils.create_causal_mask(
        config, torch.empty(2, LENGTH, 4), attention_mask=mask, position_ids=positions, **{CACHE: None}
    )


@pytest.fixture
def during_forward():
    """What a mask is made in: the forward of a model that counts positions."""
    model = llama().model
    hook = masks._Forward(masking_utils._preprocess_mask_arguments)
    hook.begin(model, (), {})
    yield model
    hook.end(model, (), None)


def noted(mask: torch.Tensor) -> torch.Tensor:
    """The mask as the forward gets it."""
    row = {"attention_mask": mask}
    loader = DataLoaderShard([row], batch_size=None, device=torch.device("cpu"))
    BatchCopies(loader, note_masks=True)
    (batch,) = loader
    assert type(batch["attention_mask"]) is torch.Tensor
    return batch["attention_mask"]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_masks_of_ones(during_forward, attention) -> None:
    mask = noted(torch.ones(2, LENGTH, dtype=torch.long))
    with Reads() as counted:
        ours = causal_mask(mask, attention)
    assert counted.of_masks == 0
    plain = causal_mask(torch.ones(2, LENGTH, dtype=torch.long), attention)
    assert ours is plain is None or torch.equal(ours, plain)


@pytest.mark.parametrize("change", ["before", "after"])
def test_masks_with_zeros(during_forward, change) -> None:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    if change == "before":
        mask[0, -2:] = 0
    mask = noted(mask)
    if change == "after":
        mask[0, -2:] = 0
    found = causal_mask(mask)
    assert found is not None and not found[0, 0, -1, -1] and found[1, 0, -1, -1]


def test_masks_without_versions(during_forward) -> None:
    with torch.inference_mode():
        assert causal_mask(noted(torch.ones(2, LENGTH, dtype=torch.long))) is None


def test_masks_of_a_program(during_forward) -> None:
    """A function of the program may need a tensor."""
    given = []

    def own(*args, attention_mask=None, **kwargs):
        given.append(attention_mask)

    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register("own", own)
    transformers.AttentionInterface.register("own", own)
    with mock.patch.dict(CONFIGS, own=LlamaConfig(attn_implementation="own")):
        causal_mask(noted(torch.ones(2, LENGTH, dtype=torch.long)), "own")
    assert given[0] is not None and given[0].all()


def test_masks_in_compiled_code(during_forward) -> None:
    mask = noted(torch.ones(2, LENGTH, dtype=torch.long))
    compiled = torch.compile(causal_mask, backend="eager", fullgraph=True)
    assert compiled(mask, "eager").shape == (2, 1, LENGTH, LENGTH)


def test_packed_positions_of_another_model_are_read(during_forward) -> None:
    found = causal_mask(None, positions=PACKED)
    assert found is not None and not found[0, 0, -1, 0]


def test_packed_positions_outside_the_forward_are_read(during_forward) -> None:
    """Another thread, or what is left of a forward that has ended."""

    def forward(self):
        return causal_mask(None, "own", PACKED)

    found = []
    with mock.patch.dict(CONFIGS, own=during_forward.config):
        assert forward(during_forward) is None  # this model's forward would have counted the positions
        thread = threading.Thread(target=lambda: found.append(forward(None)))
        thread.start()
        thread.join()
        found.append(forward(None))
    assert all(mask is not None and not mask[0, 0, -1, 0] for mask in found) and len(found) == 2


@pytest.mark.parametrize(
    ("body", "counts"),
    [
        ("position_ids = torch.arange(3)[None, :]", True),
        ("position_ids = torch.arange(3, device=x.device) + seen\nposition_ids = position_ids.unsqueeze(0)", True),
        ("position_ids = torch.arange(3) % 2", False),
        ("position_ids = torch.arange(3)\nposition_ids += x", False),
        ("position_ids = torch.arange(3)\nposition_ids, x = x", False),
        ("position_ids = torch.arange(3)\nposition_ids = text_positions", False),
        ("position_ids = self.create_position_ids_from_input_ids(input_ids)", False),
        ("hidden = self.embed(input_ids)", False),
    ],
)
def test_which_forwards_count_positions(body, counts) -> None:
    source = "    def forward(self):\n" + "".join(f"        {line}\n" for line in body.splitlines())
    with mock.patch.object(masks.inspect, "getsource", return_value=source):
        assert masks.counts_positions.__wrapped__(masking_utils.create_causal_mask) == counts
