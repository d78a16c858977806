"""Titled blocks of text."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping
from typing import Any, TextIO

_WIDTH = 60


def print_block(title: str, content: str | None = None, file: TextIO | None = None) -> None:
    """Print `title` centred in a line of 60 `=` and `content` below it, to `file` (standard output)."""
    print(f" {title} ".center(_WIDTH, "="), file=file or sys.stdout)
    if content is not None:
        print(content, file=file or sys.stdout)


def print_dict(title: str, content: Mapping[str, Any], file: TextIO | None = None) -> None:
    """Print `content` as a block of aligned `key : value` lines; long values go on below themselves."""
    left = max((len(str(key)) for key in content), default=0) + 1
    lines = []
    for key, value in content.items():
        wrapped = textwrap.wrap(str(value), max(10, _WIDTH - left - 2), drop_whitespace=False) or [""]
        lines += [f"{key if number == 0 else '':<{left}}{':' if number == 0 else ' '} {part}"
                  for number, part in enumerate(wrapped)]  # fmt: skip
    print_block(title, "\n".join(lines), file)
