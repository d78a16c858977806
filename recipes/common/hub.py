"""The Hugging Face hub, as far as a recipe must know before it uses it: names, and whether it answers."""

import queue
import threading
import urllib.error
import urllib.request

from huggingface_hub import constants

SECONDS = 3.0  # to wait for an answer


def is_hub_name(name: str) -> bool:
    """Whether `name` can name a repository on the hub: `name` or `owner/name`, unlike a path."""
    parts = name.split("/")
    return len(parts) <= 2 and all(part and part[0] not in ".~" for part in parts)


def check_hub(name: str) -> None:
    """Raise ValueError if the hub, which is to give `name`, is silent; nothing is asked of it when offline."""
    if constants.HF_HUB_OFFLINE:  # the local cache is what counts
        return
    answer = ask(constants.ENDPOINT)
    if isinstance(answer, str):
        raise ValueError(
            f"{name} is no folder here, and the hub cannot be reached ({answer}): give a folder, or set "
            "HF_HUB_OFFLINE=1 to use the local cache"
        )


def why_unavailable(model: str) -> str | None:
    """Why `model` cannot be had from the hub now; None if it can."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    answer = ask(f"{constants.ENDPOINT}/{model}/resolve/main/config.json")
    if isinstance(answer, str):
        return f"no hub ({answer})"
    return f"no {model} on the hub (status {answer})" if answer >= 400 else None


def ask(url: str) -> int | str:
    """Ask for the header of `url`; returns the HTTP status, or in words why there is none. Takes 6 s at most."""
    answers: queue.Queue[int | str] = queue.Queue()
    # A thread of its own, because no timeout covers the look-up of the host's name
    threading.Thread(target=lambda: answers.put(status(url)), daemon=True).start()
    try:
        return answers.get(timeout=2 * SECONDS)
    except queue.Empty:
        return f"{constants.ENDPOINT}: no answer for {2 * SECONDS:g} s"


def status(url: str) -> int | str:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=SECONDS) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError) as error:
        return f"{constants.ENDPOINT}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
