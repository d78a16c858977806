"""List training recipes of users, and what becomes of each: right, refused, or wrong."""

from __future__ import annotations

import argparse
import importlib
import re
import traceback
from collections.abc import Iterator

from ranks import Ranks
from sides import Side, Usage, compare, train, usages_of
from small import Encoder

TOPICS = (
    "contrastive", "penalties", "statistics_of_training", "averages", "freezing", "objectives", "transforms", "loops",
    "adapters",
)  # fmt: skip
CONFIGURATIONS = {"1 rank": (1, True), "2 ranks": (2, True), "2 ranks, kept": (2, False)}
"""(number of ranks, use_checkpoint)"""


def usages() -> Iterator[tuple[str, Usage]]:
    """(topic, usage)"""
    for topic in TOPICS:
        for usage in usages_of(importlib.import_module(topic)):
            yield topic, usage


def attempt(topic: str, name: str, use_checkpoint: bool) -> str:
    """Run a usage on this rank; an empty string if it equals plain torch, else the error and the recipe's line."""
    (recipe,) = (usage.recipe for usage in usages_of(importlib.import_module(topic)) if usage.name == name)
    try:
        compare(recipe, {"use_checkpoint": use_checkpoint})
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.endswith(f"{topic}.py")]
        kind = "difference" if isinstance(error, AssertionError) else type(error).__name__
        return f"{kind}: {' '.join(str(error).split())}" + (f" [line {frames[-1].lineno}]" if frames else "")
    return ""


def train_once(side: Side) -> None:
    train(side, side.wrap(Encoder()), steps=1)


def is_sound() -> bool:
    """Whether a model still trains on this rank, after an error. Collective."""
    try:
        compare(train_once, {})
    except Exception:
        return False
    return True


def run(ranks: Ranks, topic: str, usage: Usage, use_checkpoint: bool) -> list[str]:
    """`attempt` on every rank. Afterwards the ranks are sound, or stopped."""
    try:
        results = ranks(attempt, topic, usage.name, use_checkpoint)
        kinds = {result.split(":")[0] for result in results}
        waited = "No progress for" in results[0]
        if kinds - {"", "difference"} and (len(kinds) > 1 or waited or not all(ranks(is_sound))):
            ranks.stop()
    except AssertionError as error:  # the ranks are stopped
        return [f"ended: {' '.join(str(error).split())}"]
    return results


def judge(usage: Usage, results: list[str]) -> str:
    """right, refused, or WRONG"""
    if not any(results):
        return "right"
    matching = [bool(usage.refused and re.search(usage.refused, result)) for result in results]
    return "refused" if all(matching) or (usage.slow and any(matching)) else "WRONG"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests usages", description=__doc__)
    parser.add_argument("names", nargs="*", help="topics or usages; all if none is named")
    parser.add_argument("--errors", type=int, default=0, metavar="N", help="show N characters of each error")
    arguments = parser.parse_args()
    worlds = {size: Ranks(size) for size in (1, 2)}
    print(f"{'':38} " + " ".join(f"{name:14}" for name in CONFIGURATIONS))
    last = ""
    for topic, usage in usages():
        if arguments.names and not {topic, usage.name} & {*arguments.names}:
            continue
        if topic != last:
            print(f"\n{topic}")
        last = topic
        results = [run(worlds[size], topic, usage, kept) for size, kept in CONFIGURATIONS.values()]
        first = (usage.recipe.__doc__ or "").split("\n")[0]
        judged = " ".join(f"{judge(usage, each):14}" for each in results)
        print(f"  {usage.name:36} {judged} {first}", flush=True)
        for error in dict.fromkeys(error for each in results for error in each if error and arguments.errors):
            print(f"      {error[: arguments.errors]}")
    for ranks in worlds.values():
        ranks.stop()


if __name__ == "__main__":
    main()
