"""Comparisons of state dicts."""

import torch


def check_equal(state, expected):
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert state[name].dtype == value.dtype
        assert torch.equal(state[name], value), name


def same_storage(state):
    """Which keys share memory."""
    groups = {}
    for name, value in state.items():
        groups.setdefault(value.data_ptr(), []).append(name)
    return sorted(group for group in groups.values() if len(group) > 1)
