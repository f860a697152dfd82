"""Log lines: ``2026-11-29T22:00:00Z trainer-0 INFO message`` on stderr, one line a message.

Whatever reaches a line may come from a model or a stranger's program. So control bytes and terminal escapes are shown,
not sent; a traceback's lines are marked as continuations, so that none can pass for a line of its own; and registered
secrets are replaced wherever they appear, tracebacks included.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import time
from types import TracebackType

REDACTED = "[redacted]"
CONTINUATION = "\n  | "
UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 and C1 controls, line and paragraph separators, marks that reorder text, lone surrogates."""

_secrets: list[str] = []


def add_secret(value: str) -> None:
    """Keep ``value`` out of every log line of this process from here on; an empty one is no secret."""
    if value and value not in _secrets:
        _secrets.append(value)
        _secrets.sort(key=len, reverse=True)  # a secret may be part of a longer one


def redact(text: str) -> str:
    """``text`` without the registered secrets."""
    for secret in _secrets:
        text = text.replace(secret, REDACTED)
    return text


def escape(text: str) -> str:
    """``text`` with every character that could move a cursor or break a line written as a Python escape."""
    return UNSAFE.sub(lambda match: match.group().encode("unicode_escape").decode("ascii"), text)


class LogFormatter(logging.Formatter):
    """Formats a record as one safe line, followed by its traceback as marked continuation lines."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        message = escape(redact(record.getMessage()))
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        line = f"{when} {self._name} {record.levelname} {message}"
        if record.exc_info:
            traceback = redact(self.formatException(record.exc_info))
            line = CONTINUATION.join([line, *map(escape, traceback.split("\n"))])
        return line


class LogHandler(logging.Handler):
    """Writes to whatever ``sys.stderr`` is at that moment, so that a live display can take its place for a while."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # arguments that do not fit their message, or whose text cannot be had
            line = f"a log line could not be formatted: {record.pathname}:{record.lineno}"
        with contextlib.suppress(OSError):  # the log's disk is full or its reader gone: the run goes on
            sys.stderr.write(line + "\n")
            sys.stderr.flush()


def setup_logging(role: str, index: int, level: int | str = logging.INFO) -> None:
    """Send the log of this process to stderr, uncaught exceptions included."""
    handler = LogHandler()
    handler.setFormatter(LogFormatter(f"{role}-{index}"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    sys.excepthook = _log_uncaught


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    logging.getLogger("areal_hpc").critical("uncaught %s", kind.__name__, exc_info=(kind, error, traceback))
