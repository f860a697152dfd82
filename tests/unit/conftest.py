"""What several files of unit tests ask for; imported late, since most of them need no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from embedded_engines import MakeEngine, Models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Two small checkpoints, "old" and "new", that no test changes."""
    from embedded_engines import two_models

    return two_models(tmp_path_factory)


@pytest.fixture
def make_engine(models: Models) -> Iterator[MakeEngine]:
    """Makes embedded engines that serve "old"; they are closed when the test ends."""
    from embedded_engines import engines

    with engines(models) as make:
        yield make
