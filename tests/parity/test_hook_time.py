"""What every block costs the host beside its layer, counted in calls, which do not depend on the machine."""

import pytest

import hook_time
from cases import in_full


@pytest.fixture(autouse=True)
def _two_ranks():
    with hook_time.pretend_two_ranks():
        yield


@pytest.mark.parametrize("make", [hook_time.Llama, *in_full(hook_time.GPT2)])
def test_calls_of_the_hooks(make):
    """What opens inputs leaf by leaf, or does one thing after another to every parameter, makes many times as many."""
    first, again = (hook_time.added_calls(make) for _ in range(2))
    assert first == again, "not the same in every step"
    forward, backward = again
    assert 0 < forward <= 140
    assert 0 < backward <= 140


def test_calls_for_a_parameter():
    """Two for each, where its gradient is handed out: nothing else is done parameter by parameter."""
    few, more = (len(list(make().layers[0].parameters())) for make in (hook_time.Llama, hook_time.GPT2))
    calls, calls_for_more = (hook_time.added_calls(make)[1] for make in (hook_time.Llama, hook_time.GPT2))
    assert more > few
    assert calls_for_more - calls <= 2 * (more - few)
