"""`Options`: the arguments of `auto_wrap` that the features read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..engine.base.arguments import expect_flag, expect_number
from ..engine.runtime.world import check_zero_level
from .packed.arithmetic import QUANTIZE_FROZEN

UseCheckpoint = bool | Literal["attention", "auto"]
KeepFrozen = bool | Literal["auto"]
UseFloat8 = bool | Literal["rows"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one call of `auto_wrap`: its arguments except `model`, `blocks` and `weights`.

    The docstring of `auto_wrap` explains each of them. The values are checked when this object is created.

    Raises:
        TypeError, ValueError: a value is not among those that `auto_wrap` documents.
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
        if not _is_choice(self.keep_frozen, "auto"):
            raise ValueError(f"keep_frozen must be True, False or 'auto', not {self.keep_frozen!r}")
        name: Any = self.quantize_frozen
        if name is not None and (not isinstance(name, str) or name not in QUANTIZE_FROZEN):
            wanted = ", ".join(map(repr, QUANTIZE_FROZEN))
            raise ValueError(f"quantize_frozen must be None or one of {wanted}, got {name!r}")
        if not _is_choice(self.float8, "rows"):
            raise ValueError(f"float8 must be True, False or 'rows', got {self.float8!r}")
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
                "recomputes none of the blocks. Pass use_checkpoint=True or 'auto', or leave out offload_activations."
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
                "cuda_graphs=True records the graphs of compiled blocks, with the backend 'inductor', but compile is "
                f"{self.compile!r}. Pass compile=True as well."
            )
        others = ("float8", "quantize_frozen", "offload_activations")
        given = [f"{name}={getattr(self, name)!r}" for name in others if getattr(self, name)]
        given += [f"sequence_parallel={self.sequence_parallel}"] if self.sequence_parallel != 1 else []
        if given:
            raise ValueError(f"cuda_graphs=True cannot be combined with {', '.join(given)}. Leave out one of them.")

    @property
    def compile_options(self) -> dict[str, Any] | None:
        """The keyword arguments of torch.compile that `compile` and `cuda_graphs` stand for; None if not compiled."""
        if self.compile is False:
            return None
        options: dict[str, Any] = {"backend": "inductor" if self.compile is True else self.compile}
        return options | ({"mode": "reduce-overhead"} if self.cuda_graphs else {})

    def facts(self) -> dict[str, Any]:
        """Return {name: value} of all options. `auto_wrap` checks that this dict is the same on all ranks."""
        return {**vars(self), "keep": [*self.keep]}


def check_use_checkpoint(use_checkpoint: object) -> None:
    """Raise ValueError if `use_checkpoint` is not a value that `auto_wrap` documents."""
    if not _is_choice(use_checkpoint, "attention", "auto"):
        raise ValueError(f"use_checkpoint must be True, False, 'attention' or 'auto', not {use_checkpoint!r}")


def _is_choice(value: object, *words: str) -> bool:
    """Return whether `value` is True, False or one of the strings `words`."""
    return isinstance(value, bool) or (isinstance(value, str) and value in words)
