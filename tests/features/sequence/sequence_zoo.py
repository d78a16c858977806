"""Every family of the zoo with rows that two ranks share: equal to a plain process, or refused by name.

python tests sequence_zoo [NAME...]
"""

from __future__ import annotations

import argparse
import logging
import sys
from typing import Any

import torch

from ranks import Ranks
from sequence_models import check
from zoo_families import FAMILIES
from zoo_models import loss_of

ROUNDED = {"gemma4_unified", "diffusion_gemma_text"}
"""Families that are compared in float64: in float32 they round more than is allowed."""


def without_dropout(model: Any) -> Any:
    """Ranks would draw other numbers than one process does."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if ("drop" in name or "jitter" in name) and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def widened(model: Any) -> Any:
    """In float64, for which the fused products of experts have no kernel."""
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation_internal"):
            module.config._experts_implementation_internal = "eager"
    return model.double()


def outcome(name: str, share: int = 2) -> str:
    """Train with `share` ranks a row. Return "equal", or why the family is refused.

    Raises AssertionError if it differs. Collective.
    """
    family = FAMILIES[name]
    if family.missing:
        return "missing"
    logging.getLogger("transformers").setLevel(logging.ERROR)
    wide = name in ROUNDED

    def batch(number: int) -> Any:
        given = family.inputs(number)
        return {key: value.double() if value.is_floating_point() else value for key, value in given.items()}

    def prepare(model: Any) -> Any:
        return widened(without_dropout(model)) if wide else without_dropout(model)

    try:
        check(
            family.build, share, prepare=prepare, batches=batch if wide else family.inputs,
            loss=lambda model, batch: loss_of(model(**batch)),
        )  # fmt: skip
    except (ValueError, NotImplementedError) as error:
        if "sequence_parallel" not in str(error):
            raise
        return f"refused: {error}"
    return "equal"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="families (all)")
    names = parser.parse_args().names or list(FAMILIES)
    ranks = Ranks(2)
    different = 0
    for name in names:
        try:
            found = ranks(outcome, name)[0]
        except AssertionError as error:
            found, different = "DIFFERENT: " + " | ".join(str(error).strip().splitlines()[-3:]), different + 1
        print(f"{name:28} {found[:400]}", flush=True)
    ranks.stop()
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
