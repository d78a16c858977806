"""A short training that tests start with every launcher: `launched_job.py RESULT [--gather peer]`."""

import argparse
import json

import torch

import hf_bmtrain as bmt
from twins import Tower, ids

STEPS = 3  # on the same rows, so that the loss falls


def train(options: dict[str, str]) -> None:
    """Rank 0 writes the losses, and (rank, local rank) of everyone, to options["result"]."""
    bmt.init_distributed(seed=0, timeout=60, gather=options.get("gather", "auto"))
    model = bmt.auto_wrap(Tower())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(STEPS):
        loss = model(ids(0, bmt.rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(bmt.sum_loss(loss).item())
    world = bmt.current_world()
    places = world.gather_objects((world.rank, world.local_rank))
    if bmt.rank() == 0:
        with open(options["result"], "w") as file:
            json.dump({"losses": losses, "places": places}, file)


def plain_losses(size: int) -> list[float]:
    """The same in plain torch, in one process."""
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(STEPS):
        loss = torch.stack([model(ids(0, rank)) for rank in range(size)]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("result")
    parser.add_argument("--gather", default="auto")
    train(vars(parser.parse_args()))
