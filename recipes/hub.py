"""The Hugging Face hub, as far as a recipe must know before it uses it: names, and whether it answers."""

import queue
import threading
import urllib.request

from huggingface_hub import constants

SECONDS = 3.0  # to wait for an answer


def is_hub_name(name: str) -> bool:
    """Whether `name` can name a repository on the hub: `name` or `owner/name`, unlike a path."""
    parts = name.split("/")
    return len(parts) <= 2 and all(part and part[0] not in ".~" for part in parts)


def why_unreachable(model: str) -> str | None:
    """Why `model` cannot be had from the hub now; None if it can. Takes at most twice `SECONDS`."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    answers: queue.Queue[str | None] = queue.Queue()
    # A thread of its own, because no timeout covers the look-up of the host's name
    threading.Thread(target=lambda: answers.put(ask(model)), daemon=True).start()
    try:
        return answers.get(timeout=2 * SECONDS)
    except queue.Empty:
        return f"{constants.ENDPOINT} has not answered for {2 * SECONDS:.0f} s"


def ask(model: str) -> str | None:
    """Ask for the header of one small file of `model`; returns the reason if that fails."""
    url = f"{constants.ENDPOINT}/{model}/resolve/main/config.json"
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=SECONDS).close()
    except (OSError, ValueError) as error:
        return f"{constants.ENDPOINT} cannot be reached ({first_line(error)})"
    return None


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
