"""Log lines: their shape, what they keep secret, and that text from outside cannot forge or move them."""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.telemetry import add_secret, setup_logging
from areal_hpc.telemetry.logs import UNSAFE, LogFormatter, LogHandler, escape

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ trainer-0 [A-Z]+ .*")


@pytest.fixture
def written(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """What a process that has called ``setup_logging`` wrote to stderr; pytest's own logging is put back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []  # setup_logging would close pytest's
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr("areal_hpc.telemetry.logs._secrets", [])
    setup_logging("trainer", 0, "INFO")
    yield lambda: capsys.readouterr().err
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_says_when_who_and_what() -> None:
    record = logging.LogRecord("areal_hpc", logging.INFO, __file__, 1, "step %d", (7,), None)
    record.created = 1_795_989_600.9  # date -u -d @1795989600
    assert LogFormatter("trainer-0").format(record) == "2026-11-29T22:00:00Z trainer-0 INFO step 7"


def test_the_level_holds(written: Callable[[], str]) -> None:
    logging.getLogger("areal_hpc").debug("hidden")
    logging.getLogger("areal_hpc").info("shown")
    (line,) = written().splitlines()
    assert LINE.fullmatch(line)
    assert line.endswith("Z trainer-0 INFO shown")


def test_J14_the_log_survives_a_terminal_that_knows_only_ascii(
    written: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw, encoding="ascii", errors="backslashreplace"))
    logging.getLogger("areal_hpc").info("Größe \u4e2d")
    assert raw.getvalue().endswith(b"INFO Gr\\xf6\\xdfe \\u4e2d\n")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("\x9b31m", r"\x9b31m"),
        ("a\r\nb", r"a\r\nb"),
        ("a\u2028b\u2029c\x85d", r"a\u2028b\u2029c\x85d"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("plain \u00fc \u4e2d \U0001f600", "plain \u00fc \u4e2d \U0001f600"),
    ],
)
def test_what_could_move_a_cursor_is_shown_instead(written: Callable[[], str], text: str, shown: str) -> None:
    logging.getLogger("areal_hpc").info("model said %s", text)
    assert written().endswith(f"INFO model said {shown}\n")


def test_a_byte_that_is_no_text_is_shown_by_its_number() -> None:
    # not through a logger: pytest would keep the record, and a parallel run cannot send a lone surrogate home
    assert escape("\udcff") == r"\udcff"


@given(st.text())
def test_an_escaped_text_is_one_line_without_controls(text: str) -> None:
    shown = escape(text)
    assert len(shown.splitlines()) <= 1
    assert not UNSAFE.search(shown)
    assert all(c.isprintable() or c.isspace() or ord(c) > 0x9F for c in shown)


def test_no_text_can_forge_a_line(written: Callable[[], str]) -> None:
    forged = "x\n2026-11-29T22:00:00Z trainer-0 INFO everything is fine"
    try:
        raise ValueError(forged)
    except ValueError:
        logging.getLogger("areal_hpc").exception(forged)
    first, *others = written().rstrip("\n").split("\n")
    assert LINE.fullmatch(first)
    assert any("everything is fine" in other for other in others)
    assert all(other.startswith("  | ") for other in others)


def test_secrets_never_appear(written: Callable[[], str]) -> None:
    add_secret("tok-1234")
    add_secret("tok-1234-longer")
    add_secret("")
    log = logging.getLogger("areal_hpc")
    log.info("key=%s url=http://x/?k=tok-1234-longer", "tok-1234")
    try:
        raise RuntimeError("401 for tok-1234-longer")
    except RuntimeError:
        log.exception("failed with tok-1234")
    text = written()
    assert "tok-" not in text
    assert "-longer" not in text
    assert "key=[redacted] url=http://x/?k=[redacted]" in text


def test_an_uncaught_exception_is_logged_without_its_secret(written: Callable[[], str]) -> None:
    add_secret("tok-1234")
    try:
        raise RuntimeError("401 for tok-1234 \x1b[2J")
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    text = written()
    assert "CRITICAL uncaught RuntimeError" in text
    assert "  | RuntimeError: 401 for [redacted] \\x1b[2J" in text


def test_a_message_that_does_not_fit_its_arguments_is_named_by_its_place(written: Callable[[], str]) -> None:
    add_secret("tok-1234")
    handler = LogHandler()
    handler.setFormatter(LogFormatter("trainer-0"))
    handler.handle(logging.LogRecord("areal_hpc", logging.INFO, __file__, 7, "%d groups", ("tok-1234",), None))
    assert re.fullmatch(r"a log line could not be formatted: .*test_telemetry_logs\.py:7\n", written())


def test_a_log_that_cannot_be_written_does_not_end_the_run(
    written: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    logging.getLogger("areal_hpc").info("lost")
