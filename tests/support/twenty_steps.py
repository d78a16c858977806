"""Twenty whole steps (loss scale, clipping, a skipped step, two groups, a schedule) against torch.optim.AdamW."""

import torch

import hf_bmtrain as bmt
from hf_bmtrain.engine.runtime.world import current_world
from twins import Tower, ids

SKIPPED = 7
OPTIONS = {"betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def groups(named):
    named = list(named)
    decayed = [p for name, p in named if not name.endswith(("bias", "gain"))]
    rest = [p for name, p in named if name.endswith(("bias", "gain"))]
    return [{"params": decayed, "lr": 1e-2}, {"params": rest, "lr": 3e-2, "weight_decay": 0.0}]


def train(dtype, make_optimizer):
    """The model by `make_optimizer` and OptimManager; torch's AdamW on float32 masters from the same gradients."""
    device = current_world().device
    model = bmt.auto_wrap(Tower().to(dtype))
    twin = Tower().to(device, dtype)
    masters = {name: p.detach().to(torch.float32, copy=True) for name, p in twin.named_parameters()}
    optimizer = make_optimizer(groups(model.named_parameters()), **OPTIONS)
    plain = torch.optim.AdamW(groups(masters.items()), **OPTIONS)
    schedules = [torch.optim.lr_scheduler.LambdaLR(either, lambda t: 1 / (1 + t / 5)) for either in (optimizer, plain)]
    manager = bmt.optim.OptimManager(loss_scale=1024.0, loss_scale_steps=5)
    manager.add_optimizer(optimizer, schedules[0])
    for step in range(20):
        manager.zero_grad()
        bad = step == SKIPPED and bmt.rank() == 0
        scale = manager.loss_scale
        manager.backward(model(ids(step, bmt.rank()).to(device)) * (float("inf") if bad else 1.0))
        for name, parameter in model.named_parameters():
            masters[name].grad = parameter.gather_gradient().float() / scale
        norm = manager.clip_grad_norm(optimizer.param_groups, 0.1)
        manager.step()
        if step == SKIPPED:
            assert not torch.isfinite(norm)
            continue
        expected = torch.nn.utils.clip_grad_norm_(masters.values(), 0.1)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
        plain.step()
        schedules[1].step()
        state = {name: value.to(device) for name, value in model.state_dict().items()}
        for name, master in masters.items():
            if dtype == torch.float32:
                torch.testing.assert_close(state[name], master, rtol=1e-5, atol=1e-6, msg=name)
            else:  # the last place of a master may decide a rounding
                ulp = torch.finfo(dtype).eps * master.abs()
                assert ((state[name].float() - master).abs() <= 0.51 * ulp + 1e-6).all(), name
    assert manager.loss_scale == 1024.0 * 2 / 2 * 2 * 2
    assert {float(s["step"]) for s in optimizer.state.values()} == {19.0}
