"""What the library logs."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def log_lines(level: int = logging.WARNING) -> Iterator[list[str]]:
    """Under `with log_lines() as lines:` the messages from `level` on are collected."""
    lines: list[str] = []
    logger, handler = logging.getLogger("hf_bmtrain"), logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(level, before or level))
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
