"""Every family of the zoo against plain torch: `python tests zoo` writes recipes/guides/families.md.

With --families it writes recipes/guides/model_types.md instead.
"""

from __future__ import annotations

import argparse
import queue
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import transformers

from ranks import Ranks
from zoo_account import tell_account
from zoo_check import Row, measure
from zoo_families import FAMILIES, KINDS
from zoo_models import Family

WORLDS = 2
"""So many families are measured at a time: rank 1 waits while rank 0 computes the plain twin."""
PAGE = Path(__file__).resolve().parents[2] / "recipes" / "guides" / "families.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="print these only, and write nothing")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--families", dest="account", action="store_true", help="write model_types.md, a table of all model types"
    )
    arguments = parser.parse_args()
    if arguments.account:
        return tell_account()
    names = arguments.families or list(FAMILIES)
    results: dict[str, Row | str] = {}
    worlds = [Ranks(arguments.ranks) for _ in range(WORLDS)]
    free = queue.SimpleQueue[Ranks]()
    for world in worlds:
        world(transformers.utils.logging.disable_progress_bar)  # one after another: starting sets the environment
        free.put(world)
    with ThreadPoolExecutor(WORLDS) as pool:
        for name, (row, seconds) in zip(names, pool.map(lambda name: _measure(free, FAMILIES[name]), names)):
            results[name] = row
            print(f"{_line(FAMILIES[name], row)} {seconds:.1f} s", flush=True)
    for world in worlds:
        world.stop()
    failed = [name for name, row in results.items() if isinstance(row, str) or max(row.loss, row.gradient) > 1]
    failed = [name for name in failed if not FAMILIES[name].missing]
    if not arguments.families:
        PAGE.write_text(_page(results, arguments.ranks))
    print(f"{len(results)} families, not right: {failed or 'none'}")
    return int(bool(failed))


def _measure(free: queue.SimpleQueue[Ranks], family: Family) -> tuple[Row | str, float]:
    """The row, or why there is none, and the seconds it took in one of the free worlds."""
    ranks, begin = free.get(), time.monotonic()
    try:
        return _run(ranks, family), time.monotonic() - begin
    finally:
        free.put(ranks)


def _run(ranks: Ranks, family: Family) -> Row | str:
    """The row, or why there is none."""
    if family.missing:
        return f"this transformers has no {family.missing}"
    try:
        return ranks(measure, family.name)[0]
    except AssertionError as error:
        print(error, file=sys.stderr, flush=True)
        return "FAILED " + str(error).strip().splitlines()[-1]


def _line(family: Family, row: Row | str) -> str:
    if isinstance(row, str):
        return f"| {family.name} | {family.model} | | | | | {row} |"
    blocks = " + ".join(map(str, row.blocks)) or "none"
    outputs = ", ".join(row.outputs)
    errors = f"{row.loss:.2f} | {row.gradient:.2f}"
    return f"| {family.name} | {family.model} | {blocks} | {errors} | {outputs} | {family.note} |"


def _page(results: dict[str, Row | str], ranks: int) -> str:
    measured = [row for row in results.values() if isinstance(row, Row)]
    versions = f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}"
    kinds = "\n".join(f"- [{kind}](#{kind.lower().replace(',', '').replace(' ', '-')})" for kind in KINDS)
    text = f"""# Model families

`auto_wrap` needs no list of models: it shards the items of the model's `nn.ModuleList`s. {len(measured)} families of
transformers have been compared with plain PyTorch; the tables below list them, and [model types](model_types.md)
says of every model type of transformers whether it is among them. To compare some yourself, in two processes on a CPU:

```sh
python tests zoo llama qwen3
```

To compare your own model, use [check_parity](faults.md#wrong-numbers-check_parity).

{kinds}

`python tests zoo` wrote this page: {ranks} ranks with ZeRO-3 and recomputation against one process of plain PyTorch, in
float32 on a CPU ({versions}). Each model is small and random. It makes two steps of SGD on batches that
differ between ranks, with dropout if the family has it by default. In every row `state_dict`
has the plain model's keys, weights and buffers after training are the plain model's, and `save_pretrained` followed by
`from_pretrained` gives what it gives for the plain model.

- blocks: how many there are in each list that was found
- loss, gradient: the largest error of all steps, as a share of what is allowed: 1e-5 of the loss; 1e-5 of a gradient
  tensor's largest element plus 2e-6 of the model's
- outputs: the optional outputs of the model, which are equal in training and in evaluation
"""
    for kind, families in KINDS.items():
        text += f"\n## {kind}\n\n| family | class | blocks | loss | gradient | outputs | notes |\n{'|---' * 7}|\n"
        text += "".join(_line(family, results[family.name]) + "\n" for family in families)
    return text
