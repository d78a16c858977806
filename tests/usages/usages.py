"""List training recipes of users, and what becomes of each: right, refused, or wrong."""

from __future__ import annotations

import argparse
import importlib
import re
import traceback

from ranks import Ranks
from sides import Usage, compare

TOPICS = ["contrastive", "penalties", "statistics_of_training", "averages", "freezing"]
CONFIGURATIONS = {"1 rank": (1, {}), "2 ranks": (2, {}), "2 ranks, kept": (2, {"use_checkpoint": False})}


def usages(topic: str) -> dict[str, Usage]:
    return {usage.name: usage for usage in importlib.import_module(topic).USAGES}


def attempt(topic: str, name: str, options: dict) -> str:
    """Run a usage on this rank; an empty string if it equals plain torch, else the error and where it was raised."""
    try:
        compare(usages(topic)[name].recipe, options)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        at = [frame for frame in frames if frame.filename.endswith(f"{topic}.py")] or frames[-1:]
        kind = "difference" if isinstance(error, AssertionError) else type(error).__name__
        return f"{kind}: {' '.join(str(error).split())} [line {at[-1].lineno}]"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests usages", description=__doc__)
    parser.add_argument("names", nargs="*", help="topics or usages; all if none is named")
    parser.add_argument("--width", type=int, default=150, help="characters of a message")
    arguments = parser.parse_args()
    worlds = {size: Ranks(size) for size in (1, 2)}
    for topic in TOPICS:
        print(f"\n{topic}")
        for usage in usages(topic).values():
            if arguments.names and not {topic, usage.name} & set(arguments.names):
                continue
            first = (usage.recipe.__doc__ or "").split("\n")[0]
            print(f"  {usage.name:34} {first}", flush=True)
            last = None
            for configuration, (size, options) in CONFIGURATIONS.items():
                try:
                    results = worlds[size](attempt, topic, usage.name, options)
                except AssertionError as error:
                    results = [f"HANG or died: {error}"]
                if len({result.split(":")[0] for result in results}) > 1 or "did not reach" in str(results):
                    worlds[size].stop()  # the ranks may not be at the same operation any more
                text = [(result or "right")[: arguments.width] for result in dict.fromkeys(results)]
                if text != last:
                    for result in text:
                        print(f"      {configuration:14} {result}", flush=True)
                last = text
    for ranks in worlds.values():
        ranks.stop()


if __name__ == "__main__":
    main()
