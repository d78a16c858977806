"""Check that facts (names and shapes of tensors, options, contents of files) are equal on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from .object_comm import ObjectComm

_SHOWN = 5
"""The maximum number of differing facts (named values) that an error message shows."""
_VALUES, _LENGTH = 4, 300
"""The maximum number of different values per fact, and of characters per value, that an error message shows."""
_SAMPLED = 64
"""The number of elements that `fingerprint` reads at each of three places of a tensor: beginning, middle and end."""


def agree(
    control: ObjectComm, occasion: str, facts: Mapping[str, Any], may_differ: Mapping[str, Any] | None = None
) -> None:
    """Raise RuntimeError on every rank unless all ranks pass the same facts in the same order.

    Collective: every rank must call it. Strings are compared directly, other values by their `repr`.

    Args:
        control: exchanges Python objects between the ranks.
        occasion: the operation that the ranks are about to start. The error message begins with it.
        facts: {name: value}, the values that must be equal.
        may_differ: {name: value}, values that are not compared, but are shown in the error message to explain a
            difference, such as the file that each rank has read. Their names must be the same on every rank.

    Raises:
        RuntimeError: facts differ. The message is the same on every rank. For the first few differences, it shows which
            ranks have which value.
    """
    if control.size == 1:
        return
    mine = _texts(facts)
    digests = control.gather(_digest(repr(mine)), occasion)
    if len(set(digests)) == 1:
        return
    first = control.broadcast_object(mine)
    names = [name for name in {**first, **mine} if first.get(name) != mine.get(name)]
    found = control.gather((len(names), names[:_SHOWN]))
    count = max(number for number, _ in found)
    if not count:  # no value differs, so only the order of the facts can differ: compare the names at each position
        agree(control, occasion, {f"position {number} (from 0)": name for number, name in enumerate(mine)}, may_differ)
    shown = list(dict.fromkeys(chain.from_iterable(names for _, names in found)))[:_SHOWN]
    values = control.gather([mine.get(name, "nothing") for name in shown])
    told = [f"{name}: {_by_value(column)}" for name, column in zip(shown, zip(*values))]
    if count > len(shown):
        told.append(f"and {count - len(shown)} more")
    texts = _texts(may_differ or {})
    for name, column in zip(texts, zip(*control.gather([*texts.values()]))):
        told.append(f"{name}: {_by_value(column)}")
    raise RuntimeError(
        f"{occasion}: the ranks differ, so training would be wrong. {'; '.join(told)}. "
        "Every rank must run the same program with the same arguments, files and versions. None of these may depend on "
        "the rank, the host or the time."
    )


def _texts(facts: Mapping[str, Any]) -> dict[str, str]:
    return {name: value if isinstance(value, str) else repr(value) for name, value in facts.items()}


def _by_value(values: Sequence[str]) -> str:
    """Describe in words which ranks have which value, such as "ranks 0-2 have 5, rank 3 has 6".

    values: the value of each rank, in rank order.
    """
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    told = [f"{_ranks(ranks[value])} {value[:_LENGTH]}" for value in [*ranks][:_VALUES]]
    if len(ranks) > _VALUES:
        told.append(f"the remaining ranks have {len(ranks) - _VALUES} other values")
    return ", ".join(told)


def _ranks(numbers: Sequence[int]) -> str:
    """Return a phrase such as "rank 3 has" or "ranks 0, 2-5 have".

    numbers: the ranks to name, in ascending order.
    """
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    told = ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)
    return f"rank {told} has" if len(numbers) == 1 else f"ranks {told} have"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).hexdigest()


def fingerprint(tensor: torch.Tensor) -> str:
    """Return a string with a hash of a tensor's elements, which `agree` can compare between ranks.

    If the tensor has more than 192 elements, only 64 at the beginning, 64 in the middle and 64 at the end are hashed,
    in order to load little of a memory-mapped file. Differences in other elements are missed, but weights and optimizer
    states of different steps, seeds or runs differ nearly everywhere. The host waits for the tensor's device.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if len(flat) > 3 * _SAMPLED:
        middle = (len(flat) - _SAMPLED) // 2
        flat = torch.cat([flat[:_SAMPLED], flat[middle : middle + _SAMPLED], flat[-_SAMPLED:]])
    content = flat.contiguous().cpu().view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return f"contents {hashlib.blake2b(content, digest_size=6).hexdigest()}"


def contents(state: Any, name: str = "") -> dict[str, str]:
    """Describe the tensors, numbers and strings in nested dicts and lists, for comparison by `agree`.

    Args:
        state: a tensor, number, string or None, or nested dicts, lists and tuples of them. Other objects are left out.
        name: the path of `state` in the outermost container, such as "groups.0.lr". Empty for the outermost container.

    Returns:
        {path: description}. A tensor is described by its shape, dtype and fingerprint, any other value by its `repr`.
    """
    if isinstance(state, torch.Tensor):
        return {name: f"{tuple(state.shape)} {state.dtype} {fingerprint(state)}"}
    if isinstance(state, Mapping):
        inner = state.items()
    elif isinstance(state, (list, tuple)):
        inner = enumerate(state)
    else:
        return {name: repr(state)} if isinstance(state, (bool, int, float, str, type(None))) else {}
    return {key: value for part, held in inner for key, value in contents(held, _path(name, part)).items()}


def _path(name: str, part: Any) -> str:
    """Return the path of the item with the index or key `part`, in a container whose path is `name`.

    No two items have the same path. For example, "a.0" is the item of "a" with the integer 0, "a['0']" is the item of
    "a" with the string "0", and "['a.0']" is the item of the outermost container with the string "a.0".
    """
    plain = type(part) is int or isinstance(part, str) and part.isidentifier()
    return f"{name}.{part}".lstrip(".") if plain else f"{name}[{part!r}]"
