"""Keys in files: made once, for their owner, and never empty."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_hpc.errors import RunDirError
from areal_hpc.keys import make_key, read_key
from areal_hpc.roles.wiring.online import standing_key


def test_the_standing_key_is_made_once_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "agent-key"
    key = standing_key(path)
    assert standing_key(path) == read_key(path) == key and len(key) > 40 and key.startswith("sk-")
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("held", [b"", b"\n"])
def test_a_file_without_a_key_is_refused_by_name(tmp_path: Path, held: bytes) -> None:
    """As a crash can leave it where there are no hard links: an empty key would let in whoever brings none."""
    path = tmp_path / "token"
    path.write_bytes(held)
    path.chmod(0o600)
    for ask in (read_key, make_key, standing_key):
        with pytest.raises(RunDirError, match=f"{path} holds no key; remove it"):
            ask(path)
