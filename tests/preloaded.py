"""What a fork server imports before its first fork; see ``forked.py``."""

from __future__ import annotations

from forked import preload

preload()
