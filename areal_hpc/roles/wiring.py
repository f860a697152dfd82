"""Which implementation is used where: the only module that knows all the wings.

Each function turns the configuration and a role's place in the run into ready objects behind the protocols.
"""

from __future__ import annotations
