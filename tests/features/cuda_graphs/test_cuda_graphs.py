"""auto_wrap(cuda_graphs=True) on the CPU: results, addresses, when a step is marked, and what is refused.

The graphs themselves are tested on GPUs, in tests/gpu/test_gpu_graphs.py.
"""

from unittest import mock

import pytest
import torch

import four_bit
import hf_bmtrain as bmt
from cases import slow
from float8_models import build as build_for_float8
from float8_models import rows
from graph_checks import beside_no_graphs, move
from hf_bmtrain.engine.base.torch_internals import top_saved_tensors_hooks
from hf_bmtrain.engine.sharding.slots import buffers_of
from hf_bmtrain.features.cuda_graphs import RecordedBlocks
from hf_bmtrain.features.float8.storage import Float8Storage
from hf_bmtrain.features.options import Options
from ranks import on_ranks
from tiny_models import batch, build

older = top_saved_tensors_hooks is None
needs_hooks = pytest.mark.skipif(older, reason="torch 2.6 cannot tell whether saved-tensor hooks are active")


@slow  # Inductor compiles four forwards and backwards in each process
@needs_hooks
@on_ranks(2)
def test_parity():
    beside_no_graphs("llama", steps=3, evaluate=True)


def uncompiled(function, **options):
    """Stands in for torch.compile where the graphs themselves do not matter, because Inductor takes its time."""
    return function


def wrapped(**options):
    bmt.current_world().schedule.collective_layers = False  # an earlier test in this process may have set it
    return bmt.auto_wrap(build("llama").train(), compile=True, cuda_graphs=True, **options)


def check_addresses():
    """Full parameters keep their memory, also those that are added later, and are gathered again in each step."""
    with mock.patch.object(torch, "compile", uncompiled):
        model = wrapped()
        layers = model.model.layers
        layers[0].self_attn.q_proj.register_parameter("extra", torch.nn.Parameter(torch.ones(8)))
        bmt.auto_wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    buffers = [buffer for layer in layers for buffer in layer._bmt.buffers]
    assert len(buffers) == len(layers) + 1
    seen, others = [], []
    for step in range(3):
        model(**batch("llama", step)).loss.backward()
        seen.append([buffer.storage.full.tensor.data_ptr() for buffer in buffers])
        assert not any(buffer.is_unsharded for buffer in buffers)
        optimizer.step()
        optimizer.zero_grad()
        others.append([torch.empty_like(buffer.storage.full.tensor) for buffer in buffers])  # would take freed memory
    assert seen[0] == seen[1] == seen[2] and 0 not in seen[0]


@needs_hooks
@on_ranks(2)
def test_addresses():
    """Without Inductor, which the steps would import and run, because blocks that are recomputed are compiled there."""
    with (
        mock.patch.object(torch, "compile", uncompiled),
        mock.patch.object(torch.compiler, "cudagraph_mark_step_begin"),
    ):
        check_addresses()


@slow  # Inductor compiles the recomputed blocks in each process
@needs_hooks
@on_ranks(2)
def test_addresses_compiled():
    check_addresses()


def all_addresses(storage):
    """The addresses of what layers read, and of the memory into which it is gathered."""
    read = [*storage.buffer.full_params, *(each for factor in storage.factors if factor for each in factor)]
    return [each.data_ptr() for each in (*read, storage._arrived.tensor)]


@needs_hooks
@on_ranks(2)
def test_addresses_in_float8():
    """The gathered factors of products keep their addresses, and the full weights in their own dtype no memory."""
    bmt.current_world().schedule.collective_layers = False  # an earlier test in this process may have set it
    with (
        mock.patch.object(torch, "compile", uncompiled),
        mock.patch.object(torch.compiler, "cudagraph_mark_step_begin"),
    ):
        model = bmt.auto_wrap(build_for_float8("llama"), compile=True, cuda_graphs=True, float8=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        storages = [buffer.storage for buffer in buffers_of(model) if isinstance(buffer.storage, Float8Storage)]
        assert len(storages) == len(model.model.layers)
        seen, others = [], []
        for step in range(3):
            model(**rows(step, bmt.rank())).loss.backward()
            assert all(storage.in_float8 and not storage.buffer.is_unsharded for storage in storages)
            assert not any(storage.full.tensor.untyped_storage().nbytes() for storage in storages)
            seen.append([all_addresses(storage) for storage in storages])
            optimizer.step()
            optimizer.zero_grad()
            model.state_dict()  # gathers the full weights in their own dtype, and frees them
            others.append([torch.empty_like(storage._arrived.tensor) for storage in storages])  # takes freed memory
    assert seen[0] == seen[1] == seen[2]
    assert all(addresses[-1] for addresses in seen[0])


@needs_hooks
@on_ranks(1)
def test_when_a_step_is_marked():
    """Once for each forward, unless results are in use: then not before their backward, and never behind it."""
    with mock.patch.object(torch, "compile", uncompiled):
        model = wrapped(use_checkpoint=False)
    inputs, in_use = move(batch("llama", 0), bmt.current_world().device), mock.Mock(return_value=0)
    with (
        mock.patch.object(torch.compiler, "cudagraph_mark_step_begin") as marked,
        mock.patch.object(RecordedBlocks, "_in_use", in_use),
    ):
        for count in (1, 2):
            model(**inputs).loss.backward()
            assert marked.call_count == count
        model(**inputs)  # without a backward, and its results are freed
        first = model(**inputs).loss
        assert marked.call_count == 4
        in_use.return_value = 5
        second = model(**inputs).loss
        assert marked.call_count == 4
        (first + second).backward()
        with torch.no_grad():
            model(**inputs)
        with pytest.raises(RuntimeError, match="5 tensors .* still in use"):
            model(**inputs)
        in_use.return_value = 0
        model(**inputs).loss.backward()
        assert marked.call_count == 5
        layer, hidden = model.model.layers[0], torch.zeros(2, 7, 24)
        position = model.model.rotary_emb(hidden, torch.arange(7)[None])
        layer(hidden, position_embeddings=position, attention_mask=None)  # outside the model
        assert marked.call_count == 6


@needs_hooks
@on_ranks(1)
def test_compiled_twice():
    """As by auto_wrap and then by Trainer: the layer's own forward is compiled again, not the compiled function."""
    given = []

    def remembering(function, **options):
        given.append(function)
        return lambda *args, **kwargs: function(*args, **kwargs)

    model = bmt.auto_wrap(build("llama", blocks=1).train(), use_checkpoint=False)
    with mock.patch.object(torch, "compile", remembering):
        for _ in range(2):
            model.model.layers[0].compile(mode="reduce-overhead")
    assert len(given) == 4 and len(set(given)) == 1
    model(**batch("llama", 0))


@needs_hooks
@on_ranks(2)
def test_keep_frozen():
    """What is frozen outside blocks is not kept unsharded unless keep_frozen says so, also when adapters are added."""
    with mock.patch.object(torch, "compile", uncompiled):
        model = build("llama").requires_grad_(False)
        bmt.current_world().schedule.collective_layers = False
        bmt.auto_wrap(model, compile=True, cuda_graphs=True, keep_frozen=False)
        model.model.layers[0].mlp.register_parameter("extra", torch.nn.Parameter(torch.ones(8)))
        bmt.auto_wrap(model, keep_frozen=False)
    assert not model.model.embed_tokens._parameters["weight"].buffer.resident
    assert all(buffer.resident for layer in model.model.layers for buffer in layer._bmt.buffers)


@needs_hooks
@on_ranks(1)
def test_where_graphs_are_used():
    """In training forwards, but not in others, nor under saved-tensor hooks."""
    called = []

    def remembering(function, options, **_):
        recorded = options["triton.cudagraphs"]
        return lambda *args, **kwargs: called.append(recorded) or function(*args, **kwargs)

    model = bmt.auto_wrap(build("llama", blocks=1).train(), use_checkpoint=False)
    with mock.patch.object(torch, "compile", remembering):
        model.model.layers[0].compile(options={"triton.cudagraphs": True})
    inputs = batch("llama", 0)
    model(**inputs)
    with torch.no_grad():
        model(**inputs)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        model(**inputs)
    assert called == [True, False, False]


@needs_hooks
@on_ranks(1)
def test_the_outputs_of_the_last_block_are_copied():
    """Models return them; a graph would overwrite them in the next step."""
    outputs = []

    def remembering(function, **options):
        return lambda *args, **kwargs: outputs.append(function(*args, **kwargs)) or outputs[-1]

    with mock.patch.object(torch, "compile", remembering):
        model = wrapped(use_checkpoint=False)
    seen = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, output: seen.append(output.data_ptr()))
    model(**batch("llama", 0))
    assert [output.data_ptr() for output in outputs[:-1]] == seen[:-1]
    assert outputs[-1].data_ptr() != seen[-1]


@pytest.mark.parametrize(
    "options",
    [
        {"compile": False}, {"compile": "eager"}, {"quantize_frozen": "nf4"},
        {"sequence_parallel": 2}, {"offload_activations": True},
    ],
    ids=str,
)  # fmt: skip
def test_refused(options):
    with pytest.raises(ValueError, match="cuda_graphs=True"):
        Options(**{"zero_level": 3, "compile": True, "cuda_graphs": True, **options})


@needs_hooks
@on_ranks(1)
def test_refused_when_compiled_later():
    """As Trainer does, with torch_compile_mode."""
    model = bmt.auto_wrap(build("llama"), offload_activations=True)
    model.model.layers[0]._bmt.inputs = mock.Mock()  # on the CPU, nothing is offloaded
    with pytest.raises(ValueError, match="'max-autotune' requests, because .* offload_activations"):
        model.model.layers[0].compile(mode="max-autotune")


@needs_hooks
@on_ranks(1)
def test_refused_before_anything_is_sharded():
    model, schedule = build("llama"), bmt.current_world().schedule
    with mock.patch.object(schedule, "collective_layers", True), pytest.raises(ValueError, match="inside layers"):
        bmt.auto_wrap(model, compile=True, cuda_graphs=True)
    quantized = build("llama").requires_grad_(False)
    four_bit.quantize_layers(quantized.model.layers, False)
    with pytest.raises(ValueError, match="weights that are quantized"):
        bmt.auto_wrap(quantized, compile=True, cuda_graphs=True)
    assert not any(isinstance(module, bmt.DistributedModule) for module in model.modules())
    bmt.auto_wrap(model)


@pytest.mark.skipif(not older, reason="newer versions of torch can tell")
@on_ranks(1)
def test_refused_in_torch_2_6():
    model = build("llama")
    with pytest.raises(RuntimeError, match="torch 2.7 or newer"):
        bmt.auto_wrap(model, compile=True, cuda_graphs=True)
    assert bmt.auto_wrap(model) is model
