"""A dropped model is freed at once, without a garbage collection: nothing in it refers to what owns it but weakly."""

import gc
import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import hf_bmtrain as bmt
from cases import full, in_full, pairwise
from ranks import on_ranks
from tiny_models import batch, build

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def left_of(prepare, family):
    """Names of the modules, parameters and shards that outlive a model and its optimizer after a training step."""
    gc.collect()
    gc.disable()
    try:
        model = prepare(build(family, tied=True).train())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        outputs = model(**batch(family, 0))
        outputs.loss.backward()
        optimizer.step()
        dead = {name: _is_dead(module) for name, module in model.named_modules()}
        dead |= {name: _is_dead(parameter) for name, parameter in model.named_parameters()}
        dead |= {
            f"{name}.data": StorageWeakRef(p.data.untyped_storage()).expired for name, p in model.named_parameters()
        }
        dead |= {
            f"{name}.grad": StorageWeakRef(p.grad.untyped_storage()).expired for name, p in model.named_parameters()
        }
        assert not any(check() for check in dead.values())
        del model, optimizer, outputs
        return [name for name, check in dead.items() if not check()]
    finally:
        gc.enable()


def _is_dead(thing):
    reference = weakref.ref(thing)
    return lambda: reference() is None


def wrapped_is_freed(family, options):
    torch._dynamo.reset()
    assert left_of(lambda model: bmt.auto_wrap(model, **options), family) == []


@full
@pytest.mark.parametrize("family", ["bert", *in_full("llama")])
def test_plain(family):
    """What transformers itself frees at once."""
    assert left_of(lambda model: model, family) == []


@pytest.mark.parametrize(
    ("size", "family", "use_checkpoint"),
    pairwise([(2, "llama", True), (1, "bert", False)], [1, 2], ["llama", "bert"], [True, False]),
)
def test_wrapped(world, size, family, use_checkpoint):
    world(size)(wrapped_is_freed, family, {"use_checkpoint": use_checkpoint})


@full
@pytest.mark.skipif(TORCH < (2, 13), reason="older compilers of torch leave what they traced in a cycle")
def test_compiled(world):
    """Of other layers, such as BERT's, newer ones do as well."""
    world(1)(wrapped_is_freed, "llama", {"compile": "aot_eager"})


@on_ranks(1)
def test_a_forward_alone_does_not_keep_its_model():
    forward = bmt.auto_wrap(build("llama")).forward
    with pytest.raises(RuntimeError, match="was deleted. Keep a reference to the model"):
        forward(**batch("llama", 0))


def test_wrapped_with_copies_between_ranks(peers):
    peers(2)(wrapped_is_freed, "llama", {})
