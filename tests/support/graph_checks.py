"""Training with compiled blocks that are replayed as CUDA graphs, beside the same without graphs."""

import torch

import hf_bmtrain as bmt
from common.adapters import add_adapters
from float8_models import build as build_for_float8
from hf_bmtrain.engine.blocks.block import CheckpointBlock
from tiny_models import batch, build

STEPS = 6  # one is run to warm up, one is recorded, and the others are replayed


def train(
    family, steps=STEPS, prepare=None, forwards=1, backwards=1, length=lambda step: 7, evaluate=False,
    dtype=torch.float32, later=False, **options,
):  # fmt: skip
    """Losses and final weights.

    forwards: losses that one backward sums. backwards: accumulated before a step. later: compile as Trainer does.
    """
    torch._dynamo.reset()
    model = (build_for_float8 if options.get("float8") else build)(family).to(dtype)
    bmt.current_world().schedule.collective_layers = False  # an earlier test in this process may have set it
    mode = "reduce-overhead" if later and options.pop("cuda_graphs", False) else "default"
    model = bmt.auto_wrap((model if prepare is None else prepare(model)).train(), compile=not later, **options)
    for block in model.modules() if later else ():
        if isinstance(block, CheckpointBlock):
            block.compile(mode=mode)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, device = torch.optim.SGD(trained, lr=0.1), bmt.current_world().device
    losses = []
    for step in range(steps):
        for backward in range(backwards):
            total = torch.zeros((), device=device)
            for forward in range(forwards):
                seed = bmt.rank() + 10 * (forward + forwards * (backward + backwards * step))
                total = total + model(**move(batch(family, seed, 2, length(step)), device)).loss
            total.backward()
            losses.append(total.detach().float())
        optimizer.step()
        optimizer.zero_grad()
        if evaluate:
            with torch.no_grad():
                losses.append(model(**move(batch(family, step, 2, 5 + step), device)).loss.float())
    weights = {name: parameter.gather().detach().cpu() for name, parameter in model.named_parameters()}
    return torch.stack(losses).cpu(), weights, model


def move(inputs, device):
    return {name: value.to(device) for name, value in inputs.items()}


def beside_no_graphs(family, **options):
    """Train both ways and compare. Return how many nodes the path of torch's graphs has, and the number of blocks."""
    if options.pop("adapters", False):
        options["prepare"] = adapted
    losses, weights, model = train(family, cuda_graphs=True, **options)
    found = nodes(), sum(isinstance(module, CheckpointBlock) for module in model.modules())
    del model
    expected, others, _ = train(family, **options)
    rtol = 1e-5 if options.get("dtype") is None else 2e-2
    torch.testing.assert_close(losses, expected, rtol=rtol, atol=rtol)
    torch.testing.assert_close(weights, others, rtol=10 * rtol, atol=rtol)
    return found


def adapted(model):
    torch.manual_seed(7)
    return add_adapters(model, rank=4, alpha=8)


def nodes():
    """The number of graphs that the last step has replayed, one after another; 0 if it has not only replayed."""
    from torch._inductor.cudagraph_trees import CUDAGraphNode, get_manager

    manager = None if not torch.cuda.is_available() else get_manager(torch.cuda.current_device(), False)
    node = None if manager is None else manager.current_node
    if not isinstance(node, CUDAGraphNode) or manager.in_recording:
        return 0
    return len(list(node._path_from_root))


def dropout_changes(family):
    """Losses of one batch, with dropout and without an update: replays must draw new masks."""
    torch._dynamo.reset()
    model = bmt.auto_wrap(build(family, dropout=0.5).train(), compile=True, cuda_graphs=True, use_checkpoint=False)
    losses = []
    for _ in range(STEPS):
        loss = model(**move(batch(family, bmt.rank()), bmt.current_world().device)).loss
        loss.backward()
        losses.append(float(loss))
    return losses, nodes()


def kept_outputs():
    """What happens to outputs that are kept beyond a step, once graphs are replayed."""
    torch._dynamo.reset()
    device = bmt.current_world().device
    # BERT, because its last hidden state is the output of its last block; in Llama, a norm follows. Not recomputed,
    # because torch's checkpoint recomputes blocks from which more than their outputs is returned, without graphs.
    model = bmt.auto_wrap(build("bert").train(), compile=True, cuda_graphs=True, use_checkpoint=False)

    def step(number, **more):
        outputs = model(**move(batch("bert", number), device), **more)
        outputs.loss.backward()
        return outputs

    for number in range(STEPS):
        step(number)
    last = step(20, output_hidden_states=True).hidden_states[-1].detach()
    before = last.clone()
    step(21)
    same = torch.equal(last, before)
    hidden = step(22, output_hidden_states=True).hidden_states[1].detach()
    try:
        step(23)
    except RuntimeError as error:
        refused = str(error)
    else:
        refused = ""
    del hidden
    return same, refused
