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
from twins import Layer, Tower, ids

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


class Asked(Tower):
    """Notes, each time that somebody looks for its modules while nothing is sharded, whether another model is freed."""

    def __init__(self, is_dead):
        super().__init__()
        self.is_dead, self.noted = is_dead, []

    def named_modules(self, *args, **kwargs):
        if type(self._modules["head"]._parameters["weight"]) is torch.nn.Parameter:
            self.noted.append(self.is_dead())
        return super().named_modules(*args, **kwargs)


@pytest.mark.parametrize("by_hand", [False, *in_full(True)])
@on_ranks(2)
def test_a_failed_backward_does_not_keep_its_model(by_hand):
    """As when memory ran out, and a smaller model is built instead: before that one takes memory."""
    model = bmt.auto_wrap(Tower())

    def fail(*_):
        raise torch.OutOfMemoryError

    model.layers[1].register_full_backward_hook(fail)
    is_dead = _is_dead(model.layers[2].linear.weight.buffer)
    with pytest.raises(torch.OutOfMemoryError):
        model(ids(0, bmt.rank())).backward()
    del model
    gc.collect()
    if by_hand:
        bmt.CheckpointBlock(Layer())
        assert is_dead()
    else:
        smaller = bmt.auto_wrap(Asked(is_dead))
        assert smaller.noted[-1]
