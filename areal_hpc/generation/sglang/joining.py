"""SGLang enters the trainer's weight group within our time limit, and samples on meanwhile.

Its own way in blocks the loop that samples, for as long as torch likes: 10 minutes to half an hour when a member does
not come. Here a thread of each scheduler enters:

    client                      tokenizer's process            each scheduler
    init_weights_update_group   asks                           a thread begins to enter; "it is forming"
                                asks again, and again          "it is forming", until all ranks have come to an end
                                tells what came of it          all ranks have the group, or the first says why not
    destroy_weights_...                                        forgets one that is forming: who enters it leaves it;
                                                               drops one that has formed, and waits for nobody

The first rank alone is heard, so they vote. A group that did not form has no members left here, and its name can be
forgotten.

SGLang would destroy a group in order, which waits for its operations: with NCCL, where a member has died in the middle
of one, for ever, and with the lock that the end of the operation's own limit needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areal_hpc.collective import leave_group
from areal_hpc.generation.served.entering import entering, leave
from areal_hpc.generation.served.session import not_formed
from areal_hpc.generation.sglang.votes import all_agree
from areal_hpc.transfer import GroupAddress

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FORMING = "areal_hpc: the group is forming"
"""What a scheduler says of a group that its ranks have not all entered; of several such words SGLang makes one text."""
POLL_S = 0.05


async def join_patiently(original: Callable[..., Any], self: Any, request: Any, *more: Any) -> tuple[bool, str]:
    """In the tokenizer's process; ends, since each scheduler's entry has a limit."""
    while True:
        success, message = await original(self, request, *more)
        if FORMING not in message:
            return success, message
        await asyncio.sleep(POLL_S)


@dataclass(slots=True)
class Joining:
    """In each scheduler: the groups that this rank enters.

    Args:
        limit_s: longest time of an entry, and then of each operation on the group.
    """

    limit_s: float
    entering: dict[GroupAddress, Future[ProcessGroup]] = field(default_factory=dict)
    outcomes: dict[GroupAddress, str] = field(default_factory=dict)
    """What became of each: empty of one that was entered. Asked again while another scheduler is not so far."""

    def join(self, _: Callable[..., Any], updater: Any, request: Any) -> Any:
        """Begin to enter, or say how that stands."""
        from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqOutput as Output

        runner = updater.tp_worker.model_runner.weight_updater
        address = GroupAddress(
            host=request.master_address,
            port=int(request.master_port),
            name=request.group_name,
            world_size=request.world_size,
            backend=request.backend,
        )
        if address not in self.outcomes and address not in self.entering:
            self.entering[address] = entering(address, request.rank_offset + runner.tp_rank, self.limit_s)
        if address in self.entering:
            if not all_agree(updater, self.entering[address].done()):
                return Output(success=False, message=FORMING)
            self.outcomes[address] = self._end(self.entering.pop(address), address, updater)
        failed = self.outcomes[address]
        return Output(success=not failed, message=failed or f"Joined group {address.name}.")

    def leave(self, original: Callable[..., Any], updater: Any, request: Any) -> Any:
        """A group that has formed, or one that is forming; one of which nothing is known here is SGLang's affair."""
        from sglang.srt.managers.io_struct import DestroyWeightsUpdateGroupReqOutput as Output

        for address in [address for address in self.entering if address.name == request.group_name]:
            leave(self.entering.pop(address))
            self.outcomes[address] = f"group {address.name!r} was left before it had formed"
        group = updater.tp_worker.model_runner.weight_updater._model_update_group.pop(request.group_name, None)
        if group is None:
            return original(updater, request)
        leave_group(group)
        return Output(success=True, message=f"Left group {request.group_name}.")

    def _end(self, entered: Future[ProcessGroup], address: GroupAddress, updater: Any) -> str:
        """Keep the group if all ranks are in it, else leave it; why not all are, as far as is known here."""
        error = entered.exception()
        if all_agree(updater, error is None):
            updater.tp_worker.model_runner.weight_updater._model_update_group[address.name] = entered.result()
            return ""
        if error is not None:
            return not_formed(address, self.limit_s, error)
        leave(entered)
        return f"another rank of this engine did not enter group {address.name!r}"
