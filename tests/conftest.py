"""Before anything imports torch: one thread a process, since threads that spin for each other starve a busy machine."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import real_engines
from hypothesis import settings

if TYPE_CHECKING:
    from areal_hpc.dialogue.renderer import ChatRenderer

TESTS = Path(__file__).parent

settings.register_profile("busy", deadline=None)  # how long an example takes says how busy the machine is
settings.load_profile("busy")


def pytest_configure() -> None:
    """Whoever is started in the background of a shell ignores SIGINT, and so would all that tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without an environment for an engine its tests are skipped and say why, but not where they are asked for.

    ``AREAL_HPC_RERUNS`` is for continuous integration: how often a test that starts processes may be run again.
    """
    missing = {engine.name: why for engine in real_engines.REAL if (why := engine.unusable()) and not engine.needed}
    reruns = int(os.environ.get("AREAL_HPC_RERUNS", "0"))
    for item in items:
        engines = {mark.name for mark in item.iter_markers()} & {engine.name for engine in real_engines.REAL}
        for name in engines & missing.keys():
            item.add_marker(pytest.mark.skip(reason=missing[name]))
        if reruns and (engines or starts_processes(item.path)):
            item.add_marker(pytest.mark.flaky(reruns=reruns))


def starts_processes(test_file: Path) -> bool:
    """Whether its tests wait for others than themselves, so that a busy machine may let one fail."""
    return test_file.relative_to(TESTS).parts[0] in ("integration", "slurm", "megatron", "examples", "contract")


@pytest.fixture(autouse=True)
def handlers_of_signals() -> Iterator[None]:
    """As they were: a run in a job ignores SIGTERM once it is over, and what a test then starts would inherit that."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def dialogues(tmp_path_factory: pytest.TempPathFactory) -> "dict[str, ChatRenderer]":
    """A renderer of each model family, which no test changes."""
    from dialogues import FAMILIES, make_dialogue

    return {family: make_dialogue(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.fixture(scope="session")
def hermes(dialogues: "dict[str, ChatRenderer]") -> "ChatRenderer":
    return dialogues["hermes"]


@pytest.fixture(scope="session")
def quickstart_model(pytestconfig: pytest.Config) -> Path:
    """The tiny model that has the skill to sort and not the habit to box; a directory that no test changes."""
    from tests.quickstart_model import quickstart_model

    assert pytestconfig.cache is not None
    return quickstart_model(pytestconfig.cache)
