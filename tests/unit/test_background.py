"""One job in a thread: its result is taken once, its failure is raised where it is taken, its waiting has an end."""

from __future__ import annotations

import threading

import pytest

from areal_hpc.checkpoint import Background
from areal_hpc.errors import Fenced, WaitTimeout

WHAT = "the checkpoint of step 20"


def test_a_result_is_there_once_and_not_before_the_job_has_ended() -> None:
    background, go = Background[int](), threading.Event()

    def job() -> int:
        go.wait(10)
        return 7

    assert background.take() is None
    background.start(WHAT, job)
    assert background.take() is None
    go.set()
    background.wait(10)
    assert background.take() == 7
    assert background.take() is None
    background.start(WHAT, lambda: 8)
    background.wait(10)
    assert background.take() == 8


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), Fenced("epoch 2 owns this run")])
def test_a_failure_keeps_its_kind_and_says_what_was_being_made(error: Exception) -> None:
    def job() -> None:
        raise error

    background = Background[None]()
    background.start(WHAT, job)
    background.wait(10)
    with pytest.raises(type(error)) as raised:
        background.take()
    assert raised.value is error
    assert raised.value.__notes__ == [f"in the background, while making {WHAT}"]
    background.start(WHAT, lambda: None)  # the failure has been taken


def test_waiting_has_an_end_and_names_the_job() -> None:
    background, go = Background[None](), threading.Event()
    background.wait(0.01)  # for nothing
    background.start(WHAT, lambda: go.wait(10) and None)
    with pytest.raises(WaitTimeout, match=r"waited 0\.01 s for the checkpoint of step 20.*limits\.checkpoint_s"):
        background.wait(0.01)
    go.set()
    background.wait(10)


def test_there_is_never_a_second_job_beside_one_that_is_not_taken() -> None:
    background = Background[None]()
    background.start(WHAT, lambda: None)
    with pytest.raises(AssertionError, match="step 20 is not taken yet"):
        background.start("the checkpoint of step 40", lambda: None)


def test_a_job_that_hangs_does_not_keep_the_process_from_ending() -> None:
    background, go = Background[None](), threading.Event()
    background.start(WHAT, lambda: go.wait(10) and None)
    thread = next(thread for thread in threading.enumerate() if thread.name == WHAT)
    assert thread.daemon
    go.set()
    background.wait(10)
