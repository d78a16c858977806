"""Comparison of facts that must be equal on every rank, such as names and shapes, options, or contents of files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from .object_comm import ObjectComm

_SHOWN = 5
"""Differences that an error names."""
_VALUES, _LENGTH = 4, 300
"""Values that an error shows for each, and characters of a value."""
_SAMPLED = 64
"""Elements that a fingerprint reads in each of three places."""


def agree(
    control: ObjectComm, occasion: str, facts: Mapping[str, Any], may_differ: Mapping[str, Any] | None = None
) -> None:
    """Raise RuntimeError, the same on every rank, unless `facts` are equal on all of them, in one order. Collective.

    Two values are equal if their `repr`s are. The error names the occasion and, for a few differences, the ranks by
    value. If all are equal, each rank has sent one digest; otherwise rank 0 sends its facts, which may be thousands.

    may_differ: what the error shows besides, such as the file that each rank has read.
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
    if not count:  # they differ in their order alone
        agree(control, occasion, {f"number {number}": name for number, name in enumerate(mine)}, may_differ)
    shown = list(dict.fromkeys(chain.from_iterable(names for _, names in found)))[:_SHOWN]
    values = control.gather([mine.get(name, "nothing") for name in shown])
    told = [f"{name}: {_by_value(column)}" for name, column in zip(shown, zip(*values))]
    if count > len(shown):
        told.append(f"and {count - len(shown)} more")
    texts = _texts(may_differ or {})
    for name, column in zip(texts, zip(*control.gather([*texts.values()]))):
        told.append(f"{name}: {_by_value(column)}")
    raise RuntimeError(
        f"{occasion}: the ranks differ, and would train something that no single process trains. {'; '.join(told)}. "
        "Every rank must run the same program with the same arguments, files and versions: take none of them from the "
        "rank, the host or the time."
    )


def _texts(facts: Mapping[str, Any]) -> dict[str, str]:
    return {name: value if isinstance(value, str) else repr(value) for name, value in facts.items()}


def _by_value(values: Sequence[str]) -> str:
    """Return in words which ranks have which of `values`, which are in rank order."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    told = [f"{_ranks(ranks[value])} {value[:_LENGTH]}" for value in [*ranks][:_VALUES]]
    if len(ranks) > _VALUES:
        told.append(f"others {len(ranks) - _VALUES} other values")
    return ", ".join(told)


def _ranks(numbers: Sequence[int]) -> str:
    """Return "rank 3 has" or "ranks 0, 2-5 have"."""
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
    """Return a digest of some elements of a tensor, for `agree`. Waits for the device.

    Of more than 192 elements it reads 64 at the beginning, in the middle and at the end, so that a mapped file is
    hardly read. It misses a difference elsewhere. Weights and optimizer states of different steps, seeds or runs differ
    nearly everywhere.
    """
    flat = tensor.detach().resolve_conj().reshape(-1)
    if len(flat) > 3 * _SAMPLED:
        middle = (len(flat) - _SAMPLED) // 2
        flat = torch.cat([flat[:_SAMPLED], flat[middle : middle + _SAMPLED], flat[-_SAMPLED:]])
    content = flat.contiguous().cpu().view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return f"contents {hashlib.blake2b(content, digest_size=6).hexdigest()}"


def contents(state: Any, name: str = "") -> dict[str, str]:
    """Return by name the shape, dtype and fingerprint of the tensors, and the numbers, in nested dicts and lists."""
    if isinstance(state, torch.Tensor):
        return {name: f"{tuple(state.shape)} {state.dtype} {fingerprint(state)}"}
    if isinstance(state, Mapping):
        inner = state.items()
    elif isinstance(state, (list, tuple)):
        inner = enumerate(state)
    else:
        return {name: repr(state)} if isinstance(state, (bool, int, float, str, type(None))) else {}
    return {key: value for part, held in inner for key, value in contents(held, f"{name}.{part}".lstrip(".")).items()}
