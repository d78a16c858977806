"""Options of a model's own activation checkpointing, which `auto_wrap` replaces by that of the blocks."""

import pytest

import hf_bmtrain as bmt
from ranks import on_ranks
from tiny_models import build

CALLS = {
    "every_n_layers": [((), {"every_n_layers": 2}), (({"every_n_layers": 2},), {}), ((None, 2), {})],
    "offload": [((), {"offload": True}), ((), {"activation_checkpointing_kwargs": {"offload": True}})],
}


@on_ranks(1)
def test_options_that_would_be_ignored_are_refused():
    model = bmt.auto_wrap(build("llama"), use_checkpoint=False)
    for name, calls in CALLS.items():
        for args, kwargs in calls:
            with pytest.raises(ValueError, match=f"{name}=.*does not work with a sharded model"):
                model.activation_checkpointing_enable(*args, **kwargs)
    assert not any(block._bmt.recompute.recomputes((), {}, 0) for block in model.model.layers)
    model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=1, offload=False)
    assert all(block._bmt.recompute.recomputes((), {}, 0) for block in model.model.layers)
