"""The options of `auto_wrap` (class `Options`), and a check that later calls do not change them (`FirstOptions`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from ..engine.base.arguments import expect_flag, expect_number
from ..engine.runtime.world import check_zero_level, current_world
from ..engine.wrap.extension import Extension, WrapPlan
from .packed.arithmetic import QUANTIZE_FROZEN

UseCheckpoint = bool | Literal["attention", "auto"]
KeepFrozen = bool | Literal["auto"]
UseFloat8 = bool | Literal["rows"]
_FIRST = "_bmt_options"
"""The attribute in which each module outside blocks stores the Options of the `auto_wrap` call that sharded it."""
_SYNONYMS = ("float8", "rows"), ("compile", "inductor")
"""Pairs (option, value): passing this value for this option means the same as passing True."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one call of `auto_wrap`: its arguments except `model`, `blocks` and `weights`.

    The docstring of `auto_wrap` explains each of them. The values are checked when this object is created.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is not among those that `auto_wrap` documents.
        ValueError: two values cannot be combined.
    """

    zero_level: int
    use_checkpoint: UseCheckpoint = True
    compile: bool | str = False
    keep_frozen: KeepFrozen = "auto"
    quantize_frozen: str | None = None
    float8: UseFloat8 = False
    keep: Sequence[str] = ()
    sequence_parallel: int = 1
    offload_activations: bool = False
    mlp_chunks: int = 1
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        check_zero_level(self.zero_level)
        check_use_checkpoint(self.use_checkpoint)
        if not isinstance(self.compile, str) or not self.compile:
            expect_flag("compile", self.compile)
        _check_choice("keep_frozen", self.keep_frozen, KeepFrozen)
        name: Any = self.quantize_frozen
        if name is not None and (not isinstance(name, str) or name not in QUANTIZE_FROZEN):
            wanted = ", ".join(map(repr, QUANTIZE_FROZEN))
            raise ValueError(f"quantize_frozen must be None or one of {wanted}, got {name!r}")
        _check_choice("float8", self.float8, UseFloat8)
        keep: Any = self.keep
        if not isinstance(keep, (list, tuple)) or not all(isinstance(name, str) for name in keep):
            raise TypeError(
                "The argument keep must be a list of names of modules to exclude from float8, such as "
                f"['down_proj'], got {keep!r}"
            )
        expect_flag("offload_activations", self.offload_activations)
        if self.offload_activations and self.use_checkpoint is False:
            raise ValueError(
                "offload_activations=True keeps inputs of recomputed blocks in host memory, but use_checkpoint=False "
                "recomputes no block. Pass another use_checkpoint, or leave out offload_activations."
            )
        expect_flag("cuda_graphs", self.cuda_graphs)
        if self.cuda_graphs:
            self._check_cuda_graphs()
        wanted = "at least 1 (the number of chunks into which the tokens of an MLP are divided)"
        expect_number("mlp_chunks", self.mlp_chunks, wanted, lambda chunks: chunks >= 1, integer=True)
        wanted = "at least 1 (the number of ranks over which each sequence is split)"
        expect_number("sequence_parallel", self.sequence_parallel, wanted, lambda ranks: ranks >= 1, integer=True)

    def _check_cuda_graphs(self) -> None:
        if self.compile not in (True, "inductor"):
            raise ValueError(
                "cuda_graphs=True needs blocks that are compiled with the backend 'inductor', but compile is "
                f"{self.compile!r}. Pass compile=True as well."
            )
        others = ("quantize_frozen", "offload_activations")
        given = [f"{name}={getattr(self, name)!r}" for name in others if getattr(self, name)]
        given += [f"sequence_parallel={self.sequence_parallel}"] if self.sequence_parallel != 1 else []
        if given:
            raise ValueError(
                f"cuda_graphs=True cannot be combined with {', '.join(given)}. Leave out one or the other."
            )

    @property
    def compile_options(self) -> dict[str, Any] | None:
        """The arguments of torch.compile that `compile` and `cuda_graphs` select; None if blocks are not compiled."""
        if self.compile is False:
            return None
        options: dict[str, Any] = {"backend": "inductor" if self.compile is True else self.compile}
        return options | ({"mode": "reduce-overhead"} if self.cuda_graphs else {})

    def facts(self) -> dict[str, Any]:
        """Return {name: value} of all options. `auto_wrap` checks that this dict is the same on all ranks."""
        return {**vars(self), "keep": [*self.keep]}

    def given(self) -> dict[str, Any]:
        """Return {name: value} of the options that differ from their defaults."""
        defaults = Options(zero_level=current_world().zero_level).facts()
        return {name: value for name, value in self.facts().items() if value != defaults[name]}


class FirstOptions(Extension):
    """Refuses options in a later call of `auto_wrap` that differ from those of the call that sharded the model.

    A later call only shards parameters that were added to the model after the first call, so a different option would
    have no effect. Instead of ignoring such an option, `admit` raises ValueError.

    An option that has its default value in the later call is not compared. So the call `auto_wrap(model)`, without
    options, is always accepted. If the model was sharded without `auto_wrap`, every option that differs from its
    default is refused.

    Args:
        options: the arguments that were passed to `auto_wrap`.
    """

    def __init__(self, options: Options) -> None:
        self._options = options

    def admit(self, model: torch.nn.Module, late: bool) -> None:
        given = self._options.given() if late else {}
        first = [vars(module)[_FIRST].facts() for module in model.modules() if _FIRST in vars(module)]
        if given and not first:
            raise ValueError(
                f"auto_wrap: {_listed(given)} would have no effect, because the CheckpointBlocks or DistributedModules "
                f"of this {type(model).__name__} were not made by auto_wrap. Call auto_wrap(model) without options."
            )
        for known in first:
            changed = {name: value for name, value in given.items() if _differ(name, value, known[name])}
            if changed:
                raise ValueError(
                    f"auto_wrap: this model was wrapped with {_listed({name: known[name] for name in changed})}, which "
                    f"a later call cannot change to {_listed(changed)}. Load the model again and pass "
                    f"{_listed(changed)} in the first call. To shard parameters that were added since, call "
                    "auto_wrap(model) without options."
                )

    def connect(self, plan: WrapPlan) -> None:
        for module in () if plan.late else plan.root:
            vars(module)[_FIRST] = self._options


def _differ(name: str, *values: Any) -> bool:
    """Return whether two values of the option `name` have different effects.

    For example, compile=True and compile="inductor" have the same effect, so the result for them is False.
    """
    first, second = (True if (name, value) in _SYNONYMS else value for value in values)
    return first != second


def _listed(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def check_use_checkpoint(use_checkpoint: object) -> None:
    """Raise ValueError if `use_checkpoint` is not a value that `auto_wrap` documents."""
    _check_choice("use_checkpoint", use_checkpoint, UseCheckpoint)


def words_of(choice: Any) -> list[str]:
    """Return the strings that the type `choice` allows. For `bool | Literal["a", "b"]`, they are "a" and "b"."""
    return [word for part in get_args(choice) for word in get_args(part)]


def _check_choice(name: str, value: object, choice: Any) -> None:
    """Raise ValueError unless `value` is a bool, or one of the strings that the type `choice` allows.

    name: the name of the argument with this value, for the message.
    """
    words = words_of(choice)
    if not isinstance(value, bool) and not (isinstance(value, str) and value in words):
        *first, last = map(repr, (True, False, *words))
        raise ValueError(f"{name} must be {', '.join(first)} or {last}, not {value!r}")
