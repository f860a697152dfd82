"""A part: one further node's share of an engine that spans several nodes, until it is told to stop.

The engine's generator is on its first node, answers for all of it, and starts it anew when any share has died.
"""

from __future__ import annotations

import asyncio

from areal_hpc.exits import EXIT_STOPPED
from areal_hpc.roles.process import RoleProcess
from areal_hpc.roles.wiring.shares import hold_shares


def main(process: RoleProcess) -> int:
    process.publish_endpoint({})
    process.starting.close()
    asyncio.run(hold_shares(process))
    return EXIT_STOPPED
