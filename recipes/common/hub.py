"""Checks of the Hugging Face Hub: valid names, and whether it answers."""

import queue
import threading
import urllib.error
import urllib.request

from huggingface_hub import constants

SECONDS = 3.0  # the timeout of a request


def is_hub_name(name: str) -> bool:
    """Return whether `name` has the form of a repository on the Hub, `name` or `owner/name`, rather than of a path."""
    parts = name.split("/")
    return len(parts) <= 2 and all(part and part[0] not in ".~" for part in parts)


def check_hub(name: str) -> None:
    """Raise ValueError if the Hub does not answer. Do nothing if HF_HUB_OFFLINE is set.

    name: the option and value that need the Hub, such as "--model bert-base-uncased", for the error message.
    """
    if constants.HF_HUB_OFFLINE:  # only the local cache is used then
        return
    answer = ask(constants.ENDPOINT)
    if isinstance(answer, str):
        raise ValueError(
            f"{name} is no folder here, and the hub cannot be reached ({answer}): give a folder, or set "
            "HF_HUB_OFFLINE=1 to use the local cache"
        )


def why_unavailable(model: str) -> str | None:
    """Return why the model named `model` cannot be loaded from the Hub, or None if it can."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    answer = ask(f"{constants.ENDPOINT}/{model}/resolve/main/config.json")
    if isinstance(answer, str):
        return f"no hub ({answer})"
    return f"no {model} on the hub (status {answer})" if answer >= 400 else None


def ask(url: str) -> int | str:
    """Send a HEAD request. Return the HTTP status, or a text with the reason if there is no answer within 6 s."""
    answers: queue.Queue[int | str] = queue.Queue()
    # Send the request in a thread, because urlopen's timeout does not limit the look-up of the host's name.
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
