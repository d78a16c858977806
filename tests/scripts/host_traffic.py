"""Bytes that enter a host in a step, measured on the cable between two network namespaces that stand for two hosts.

Starts torchrun in each of them, as on two hosts, and compares with plain torch. It needs root's rights. The figures are
simulated: of gloo on one machine, headers of TCP included. In units of M, the bytes of the weights, with H hosts of G
ranks, a step of ZeRO-3 without recomputation gathers twice and reduces once:

    flat        gloo's ring crosses into a host once: (HG-1)/HG a gather; the reduction brings (H-1)G/H
    two levels  each foreign shard enters a host once: (H-1)/H a gather, and as much for the reduction
    host        nothing is gathered; an all-reduce of each shard: 2(H-1)/H
    host+world  each foreign shard enters a host once: (H-1)/H for one gather, and as much for the reduction
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import hf_bmtrain as bmt
from processes import environment, kill_all

ADDRESSES = "10.213.9.1", "10.213.9.2"
WIRE = "wire0"
HOSTS, LOCAL = 2, 2
WIDTH, LAYERS, STEPS = 512, 6, 3
MODES = {
    "flat": {"gather": "collective"},
    "two levels": {},
    "host": {"shard_over": "host"},
    "host+world": {"shard_over": "host+world"},
}
EXPECTED = {
    "flat": 2 * (HOSTS * LOCAL - 1) / (HOSTS * LOCAL) + (HOSTS - 1) * LOCAL / HOSTS,
    "two levels": 3 * (HOSTS - 1) / HOSTS,
    "host": 2 * (HOSTS - 1) / HOSTS,
    "host+world": 2 * (HOSTS - 1) / HOSTS,
}


def main() -> int:
    if "RANK" in os.environ:
        train(os.environ["MODE"], Path(os.environ["RESULT"]))
        return 0
    print(f"{'mode':12} {'entered, in M':>14} {'formula':>8} {'largest difference of a loss':>29}")
    wrong = 0
    with hosts() as inside, tempfile.TemporaryDirectory() as folder:
        for mode, expected in EXPECTED.items():  # several MB each, so that headers and small messages are a few percent
            result = Path(folder) / "result.json"
            run(inside, mode, result)
            found = json.loads(result.read_text())
            apart = max(abs(mine - other) for mine, other in zip(found["losses"], plain_losses()))
            good = abs(found["entered"] - expected) < 0.1 * expected and apart < 1e-5
            wrong += not good
            print(
                f"{mode:12} {found['entered']:14.2f} {expected:8.2f} {apart:29.1e}{'' if good else '  WRONG'}",
                flush=True,
            )
    return 1 if wrong else 0


def run(inside: list[list[str]], mode: str, result: Path) -> None:
    """Run torchrun on both hosts, and raise RuntimeError with what one printed if it fails."""
    variables = environment(GLOO_SOCKET_IFNAME=WIRE, MODE=mode, RESULT=str(result), ACCELERATE_USE_CPU="true")
    variables = {key: value for key, value in variables.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    started = [
        subprocess.Popen(
            [
                *host, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number),
                "--nproc-per-node", str(LOCAL), "--master-addr", ADDRESSES[0], "--master-port", "29500",
                str(Path(__file__).parents[1]), Path(__file__).stem,
            ],
            env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for number, host in enumerate(inside)
    ]  # fmt: skip
    try:
        for process in started:
            output = process.communicate(timeout=200)[0]
            if process.returncode:
                raise RuntimeError(f"{mode}: torchrun ended with {process.returncode}\n{output[-4000:]}")
    finally:
        for process in started:
            if process.poll() is None:
                kill_all(process)


@contextmanager
def hosts() -> Iterator[list[list[str]]]:
    """Two network namespaces with a cable between them and names of their own: what to put before a command."""
    if not (shutil.which("ip") and shutil.which("unshare")):
        raise SystemExit("needs the programs ip and unshare")
    names = [f"hf-bmtrain-traffic-{os.getpid()}-{number}" for number in range(HOSTS)]
    made = []
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
        _ip("link", "add", WIRE, "netns", names[0], "type", "veth", "peer", "name", WIRE, "netns", names[1])
        for name, address in zip(names, ADDRESSES):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", WIRE)
            for device in ("lo", WIRE):
                _ip("-n", name, "link", "set", device, "up")
        rename = 'hostname {0} && exec "$@"'
        yield [
            ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", rename.format(name), "sh"] for name in names
        ]
    finally:
        for name in made:
            _ip("netns", "delete", name)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"this machine makes no network namespaces: ip {' '.join(arguments)}: {done.stderr.strip()}")


# -- on each rank -----------------------------------------------------------------------------------------------------


def make() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.Tanh()) for _ in range(LAYERS)]
    return torch.nn.Sequential(*layers)


def loss_of(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(rows).square().mean()


def train(mode: str, result: Path) -> None:
    """Train with SGD; rank 0 writes the mean losses, and the bytes a step that entered its host, in units of M."""
    bmt.init_distributed(timeout=120, **MODES[mode])
    model = make()
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    bmt.auto_wrap(model, blocks=[*model.children()], use_checkpoint=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, before = [], 0
    for step in range(STEPS + 1):
        if step == 1:  # what the first step sets up is left out
            bmt.synchronize()
            before = _entered()
        loss = loss_of(model, step, bmt.rank())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(bmt.sum_loss(loss).item())
    bmt.synchronize()
    entered = _entered() - before
    if bmt.rank() == 0:
        result.write_text(json.dumps({"losses": losses, "entered": entered / STEPS / nbytes}))


def _entered() -> int:
    """The bytes that the cable has brought to this host."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():  # /sys shows another namespace's devices
        name, _, counts = line.partition(":")
        if name.strip() == WIRE:
            return int(counts.split()[0])
    raise RuntimeError(f"no device {WIRE}")


def plain_losses() -> list[float]:
    """The same in plain torch, in one process."""
    model, losses = make(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS + 1):
        loss = torch.stack([loss_of(model, step, rank) for rank in range(HOSTS * LOCAL)]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
