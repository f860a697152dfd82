"""The loop that serves: whichever it is, it behaves as Python's own."""

from __future__ import annotations

import asyncio
import sys

import pytest

from areal_hpc import event_loop


async def loops_module() -> str:
    return type(asyncio.get_running_loop()).__module__


def test_uvloop_is_used_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvloop")
    assert event_loop.run(loops_module()) == "uvloop"
    monkeypatch.setattr(event_loop, "find_spec", lambda _: None)
    assert event_loop.run(loops_module()).startswith("asyncio")


def test_what_it_runs_ends_as_under_asyncio() -> None:
    async def fails() -> None:
        raise KeyError("x")

    async def child() -> int:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "raise SystemExit(7)")
        return await process.wait()

    with pytest.raises(KeyError):
        event_loop.run(fails())
    assert event_loop.run(child()) == 7
