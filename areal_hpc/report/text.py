"""Numbers as a person reads them, in ASCII; a number that is not there is a dash."""

from __future__ import annotations

from areal_hpc.telemetry.logs import escape

MISSING = "-"


def number(value: float | None) -> str:
    """Four significant digits: rewards and gaps have any scale and sign."""
    return MISSING if value is None else f"{value:.4g}"


def count(value: float | None) -> str:
    """A whole number with thousands separated."""
    return MISSING if value is None else f"{value:,.0f}"


def size(num_bytes: float | None) -> str:
    """Bytes in the largest binary unit that leaves at least one."""
    if num_bytes is None:
        return MISSING
    power = max(0, min(4, (int(num_bytes).bit_length() - 1) // 10))
    return f"{num_bytes / 1024**power:,.{1 if power else 0}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def percent(value: float | None) -> str:
    """A fraction as per cent."""
    return MISSING if value is None else f"{100 * value:.0f}%"


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds: ``1:02:03``, or ``12 d 1:02:03``."""
    if seconds is None:
        return MISSING
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days} d {hour}:{minute:02}:{second:02}" if days else f"{hour}:{minute:02}:{second:02}"


def one_line(text: str) -> str:
    """What somebody else wrote, such as an exception's message, without line breaks, control bytes and non-ASCII."""
    return escape(text).encode("ascii", "backslashreplace").decode()
