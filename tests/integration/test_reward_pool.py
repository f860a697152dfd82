"""The reward pool with real processes, real hangs and real kills."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_hpc.errors import ConfigError, RewardError, RewardRaised
from areal_hpc.rollout.reward_pool import RewardPool
from areal_hpc.types import Prompt

HERE = Path(__file__).parent
OTHERS = set[psutil.Process]()
PROMPT = Prompt(position=4, id="the-prompt", messages=({"role": "user", "content": "?"},), answer="1")


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


@asynccontextmanager
async def pool_of(name: str = "act", *, workers: int = 1, timeout_s: float = 30.0) -> AsyncIterator[RewardPool]:
    pool = RewardPool(f"hostile_rewards:{name}", workers=workers, timeout_s=timeout_s)
    try:
        yield pool
    finally:
        await pool.close()
        assert children() == []


@pytest.fixture(autouse=True)
def _others() -> None:
    """Processes that were there before the test belong to other tests, such as the standard library's trackers."""
    OTHERS.clear()
    OTHERS.update(psutil.Process().children(recursive=True))


def direct_children() -> list[psutil.Process]:
    return [process for process in psutil.Process().children() if process not in OTHERS]


def children() -> list[psutil.Process]:
    """Processes below this one; a killed one may take a moment to be gone."""
    for _ in range(100):
        below = (p for p in psutil.Process().children(recursive=True) if p not in OTHERS)
        alive = [p for p in below if p.status() != psutil.STATUS_ZOMBIE]
        if not alive:
            break
        time.sleep(0.02)
    return alive


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def until(ready: Any) -> Any:
    while not (answer := ready()):
        await asyncio.sleep(0.01)
    return answer


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("exit", "exit code 7"),
        ("sys.exit", "SystemExit"),
        ("segfault", "SIGSEGV"),
        ("raise", "raised ZeroDivisionError at hostile_rewards.py"),
        ("base exception", "NotAnException.*out of time"),
        ("unprintable", "raised Unprintable"),
        ("scribble", "its process"),
        ("recurse", "RecursionError"),
        ("allocate", "MemoryError"),
        ("close descriptors", "its process"),
        ("nan", "returned nan, which is no finite float"),
        ("inf", "returned -inf, which is no finite float"),
        ("none", "NoneType, not a number"),
        ("string", "str, not a number"),
        ("dict", "dict, not a number"),
        ("complex", "complex, not a number"),
        ("array", "ndarray, not a number"),
        ("huge", "returned an int, which is no finite float"),
    ],
)
def test_I9_I15_a_reward_that_fails_is_named_and_its_worker_replaced_unless_it_merely_raised(
    action: str, reason: str
) -> None:
    kept = action in {"raise", "unprintable"} or reason.startswith(("returned", "NoneType")) or "not a number" in reason

    async def test() -> None:
        async with pool_of() as pool:
            before = await pool.score("pid", PROMPT)
            with pytest.raises(RewardError, match=f"hostile_rewards:act' on prompt 'the-prompt'.*{reason}"):
                await pool.score(action, PROMPT)
            assert (await pool.score("pid", PROMPT) == before) == kept
            assert is_alive(int(before)) == kept

    run(test())


@pytest.mark.parametrize(
    ("action", "reward_itself"), [("raise", True), ("nan", True), ("none", True), ("exit", False), ("sleep", False)]
)
def test_whether_the_reward_itself_failed_is_told_from_what_befell_it(action: str, reward_itself: bool) -> None:
    async def test() -> None:
        async with pool_of(timeout_s=0.8) as pool:
            with pytest.raises(RewardError) as failure:
                await pool.score(action, PROMPT)
            assert isinstance(failure.value, RewardRaised) == reward_itself

    run(test())


@pytest.mark.parametrize("action", ["sleep", "ignore sigterm", "loop in c", "fork and hang", "fork and exit"])
def test_I8_a_reward_that_hangs_is_killed_with_all_it_started(action: str) -> None:
    async def test() -> None:
        async with pool_of(workers=2, timeout_s=0.8) as pool:
            await pool.start()
            hung, fine = await asyncio.gather(
                pool.score(action, PROMPT), pool.score("float", PROMPT), return_exceptions=True
            )
            assert isinstance(hung, RewardError)
            assert "did not return in 0.8 s" in str(hung)
            assert fine == 0.25
            assert await pool.score("float", PROMPT) == 0.25

    run(test())


@pytest.mark.parametrize(
    ("action", "value"),
    [("float", 0.25), ("bool", 1.0), ("int", 3.0), ("float32", 0.5), ("bool_", 1.0), ("print", 0.5)],
)
def test_numbers_of_any_kind_are_rewards_and_printed_text_is_not(action: str, value: float) -> None:
    async def test() -> None:
        async with pool_of() as pool:
            assert await pool.score(action, PROMPT) == value

    run(test())


def test_a_child_that_runs_out_of_the_reward_cannot_answer_for_it() -> None:
    async def test() -> None:
        async with pool_of() as pool:
            assert await pool.score("fork and return", PROMPT) == 1.0
            assert [await pool.score(action, PROMPT) for action in ("float", "int", "float")] == [0.25, 3.0, 0.25]

    run(test())


def test_I12_partials_and_callable_objects_get_text_answer_and_prompt() -> None:
    async def test() -> None:
        async with pool_of("partial") as pool:
            assert await pool.score("abc", PROMPT) == 2.0 * 3 + 1 + 4
        async with pool_of("prepared") as pool:
            assert await pool.score("", PROMPT) == 1.0
            assert await pool.score("", PROMPT) == 1.0

    run(test())


@pytest.mark.parametrize("name", ["missing", "not_callable"])
def test_a_reward_that_cannot_be_loaded_is_the_users_to_mend(name: str) -> None:
    async def test() -> None:
        async with pool_of(name) as pool:
            with pytest.raises(ConfigError, match=rf"hostile_rewards:{name}.*rollout\.reward"):
                await pool.start()
            with pytest.raises(ConfigError, match=name):
                await pool.score("", PROMPT)

    run(test())


def test_a_reward_whose_extra_is_missing_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "math_verify.py").write_text("raise ModuleNotFoundError(\"No module named 'math_verify'\")\n")
    monkeypatch.syspath_prepend(tmp_path)

    async def test() -> None:
        pool = RewardPool("areal_hpc.rollout.rewards:math_answer", workers=1, timeout_s=5.0)
        with pytest.raises(ConfigError, match=r"run `pip install 'areal-hpc\[math\]'`, or in a clone .*`$"):
            await pool.start()
        await pool.close()

    run(test())


def test_the_limit_counts_the_call_and_not_the_line_before_it() -> None:
    """Eight calls of one worker take longer together than the limit of one."""

    async def test() -> None:
        async with pool_of("slow", timeout_s=1.5) as pool:
            assert await asyncio.gather(*(pool.score("", PROMPT) for _ in range(8))) == [1.0] * 8

    run(test())


def test_a_cancelled_call_does_not_leave_its_answer_to_the_next() -> None:
    async def test() -> None:
        async with pool_of() as pool:
            await pool.start()
            call = asyncio.create_task(pool.score("sleep", PROMPT))
            await asyncio.sleep(0.1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert await pool.score("float", PROMPT) == 0.25

    run(test())


def test_a_call_cancelled_while_the_worker_loads_keeps_the_worker() -> None:
    async def test() -> None:
        async with pool_of() as pool:
            call = asyncio.create_task(pool.score("float", PROMPT))
            (started,) = await until(direct_children)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert await pool.score("pid", PROMPT) == started.pid

    run(test())


def test_I6_calls_from_many_tasks_run_in_processes_without_torch() -> None:
    async def test() -> None:
        async with pool_of(workers=2) as pool:
            await pool.start()
            assert await asyncio.gather(*(pool.score("int", PROMPT) for _ in range(64))) == [3.0] * 64
            assert await pool.score("torch", PROMPT) == 0.0
            assert len(direct_children()) == 2

    run(test())


def test_idle_workers_use_no_cpu() -> None:
    async def test() -> None:
        async with pool_of() as pool:
            worker = psutil.Process(int(await pool.score("pid", PROMPT)))
            await until(lambda: worker.status() == psutil.STATUS_SLEEPING)
            await asyncio.sleep(0.1)
            before = worker.cpu_times(), worker.num_ctx_switches()
            await asyncio.sleep(0.3)
            assert (worker.cpu_times(), worker.num_ctx_switches()) == before
            assert worker.num_threads() == 1

    run(test())


def test_close_ends_a_call_in_its_middle_and_refuses_the_next() -> None:
    async def test() -> None:
        pool = RewardPool("hostile_rewards:act", workers=1, timeout_s=30.0)
        await pool.start()
        calls = [asyncio.create_task(pool.score("ignore sigterm", PROMPT)) for _ in range(2)]
        await asyncio.sleep(0.1)
        await pool.close()
        assert children() == []
        for call in calls:
            with pytest.raises(RewardError):
                await call
        with pytest.raises(RewardError, match="closed"):
            await pool.score("float", PROMPT)

    run(test())


def test_the_kernel_ends_workers_and_their_children_when_the_parent_is_killed(tmp_path: Path) -> None:
    """Both loop in C with the interpreter's lock held: no thread or handler of theirs could notice."""
    noted = tmp_path / "pids"
    code = (
        "import asyncio; from areal_hpc.rollout.reward_pool import RewardPool; from areal_hpc.types import Prompt\n"
        "pool = RewardPool('hostile_rewards:note_pids', workers=1, timeout_s=300.0)\n"
        f"asyncio.run(pool.score({str(noted)!r}, Prompt(position=0, id='p', messages=())))"
    )
    path = os.pathsep.join([str(HERE), *sys.path])
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path})
    try:
        asyncio.run(asyncio.wait_for(until(noted.exists), 60))
        pids = [int(pid) for pid in noted.read_text(encoding="utf-8").split()]
        assert all(is_alive(pid) for pid in pids)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    asyncio.run(asyncio.wait_for(until(lambda: not any(is_alive(pid) for pid in pids)), 10))


def test_workers_replaced_many_times_leave_nothing_behind() -> None:
    async def test() -> None:
        async with pool_of() as pool:
            await pool.score("int", PROMPT)
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(6):
                with pytest.raises(RewardError):
                    await pool.score("exit", PROMPT)
            await pool.score("int", PROMPT)
            assert len(os.listdir("/proc/self/fd")) == before
            assert len(direct_children()) == 1

    run(test())


def test_I6_I8_mathematics_that_takes_for_ever_costs_one_sample() -> None:
    async def test() -> None:
        pool = RewardPool("areal_hpc.rollout.rewards:math_answer", workers=2, timeout_s=2.0)
        await pool.start()
        prompt = Prompt(position=0, id="third", messages=(), answer=r"\frac{1}{3}")
        answers = [r"\boxed{9^{9^{9^9}}}", r"\boxed{\frac{2}{6}}", r"\boxed{0.3}"]
        tower, *others = await asyncio.gather(*(pool.score(a, prompt) for a in answers), return_exceptions=True)
        assert isinstance(tower, RewardError)
        assert others == [1.0, 0.0]
        await pool.close()

    run(test())


def test_what_a_reward_prints_goes_to_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        async with pool_of() as pool:
            await pool.score("print", PROMPT)

    run(test())
    printed = capfd.readouterr()
    assert printed.out == ""
    assert '{"reward": 99.0}' in printed.err
