"""torch.set_default_device: what the library makes for itself does not follow it."""

import functools
import tempfile

import pytest
import torch
import torch.distributed as dist

import hf_bmtrain as bmt
from cases import by_default
from float8_models import build, rows
from ranks import on_ranks

BATCHES = 3
CASES = [
    {}, {"optimizer": "offload"}, {"dtype": torch.bfloat16}, {"zero_level": 2, "use_checkpoint": False},
    {"float8": True}, {"optimizer": "recording"}, {"dtype": torch.float16}, {"optimizer": "torch"},
]  # fmt: skip
OPTIMIZERS = {
    "adam": bmt.optim.AdamOptimizer, "torch": torch.optim.AdamW, "offload": bmt.optim.AdamOffloadOptimizer,
    "recording": functools.partial(bmt.optim.AdamOffloadOptimizer, record_delta=True),
}  # fmt: skip


def shared_folder():
    folder = [tempfile.mkdtemp()]
    if bmt.world_size() > 1:
        dist.broadcast_object_list(folder)
    return folder[0]


def train(device, optimizer="adam", dtype=torch.float32, **wrap):
    """Losses, norms of gradients and weights of a training that is saved and resumed, under a default device."""
    model, batches = build("llama").to(dtype), [rows(step, bmt.rank()) for step in range(BATCHES)]
    folder, shown = shared_folder(), []
    with torch.device(device):
        bmt.auto_wrap(model, **wrap)
        chosen = OPTIMIZERS[optimizer](model.parameters(), lr=1e-2)
        manager = bmt.optim.OptimManager(loss_scale=1024 if dtype == torch.float16 else None)
        manager.add_optimizer(chosen, bmt.lr_scheduler.Linear(chosen, 1e-2, 2, 50))
        for step, batch in enumerate(batches):
            loss = model(**batch).loss
            manager.zero_grad()
            manager.backward(loss)
            norm = manager.clip_grad_norm(chosen.param_groups, 1.0)
            manager.step()
            shown += [bmt.sum_loss(loss).item(), float(norm)]
            if step == 1:
                bmt.save_state(folder, model, manager, step=step)
        bmt.save(model, f"{folder}/whole.safetensors")
        bmt.load(model, f"{folder}/whole.safetensors")
        values = model.state_dict()
        assert bmt.load_state(folder, model, manager).step == 1
        with bmt.gathered(model):
            shown.append([parameter.clone() for parameter in model.parameters()])
        bmt.synchronize()
    return shown, values


@pytest.mark.parametrize(
    "case",
    by_default(CASES, {"optimizer": "offload"}, {"optimizer": "torch"}, {"float8": True}),
    ids=lambda case: "-".join(map(str, case.values())) or "plain",
)
@on_ranks(2)
def test_default_device(case):
    (shown, values), (expected, others) = (train(device, **case) for device in ("meta", "cpu"))
    assert shown[:-1] == expected[:-1]
    for one, other in zip([*shown[-1], *values.values()], [*expected[-1], *others.values()], strict=True):
        assert one.device == other.device and torch.equal(one, other)
