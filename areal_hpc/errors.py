"""Every error a person can meet, as one tree.

    ArealError
    ├── UserError (also ValueError)   the person can mend it: names the key, path or rank and ends with what to do
    │   ├── ConfigError               unknown key, wrong type, impossible combination
    │   ├── DevicesLost               a node has lost the devices that a process was given there; names both
    │   ├── DataError                 a data set, model directory or prompt that cannot be used
    │   ├── RunDirError               the run directory is in use, foreign, or not what it should be
    │   ├── SubmissionError           Slurm refused the job, or does not answer
    │   └── CheckpointError           no checkpoint that can be loaded, or one that does not fit
    ├── WaitTimeout (also TimeoutError)  a bounded wait ended; names what it waited for and for how long
    ├── CorruptRecord                 bytes that fail their checksum; names chain, segment and sequence number
    │   └── CorruptDocument (also ValueError)  a file that should hold JSON and holds none; names it
    ├── Fenced                        a newer attempt owns the run; this process must stop and publish nothing
    ├── GenerationError               an engine answered with an error, garbage, or not at all
    │   └── RequestRefused            it will not answer this request, however often it is asked
    ├── WeightUpdateError             an engine did not take the new weights whole; names the engine
    ├── RewardError                   a reward function raised, hung, or returned no finite number
    │   └── RewardRaised              it raised or returned no finite number, and would do so again
    ├── AgentError                    an agent raised, exited, or asked the model nothing
    ├── RoleDied                      a process of the run ended; names it, its exit code and its last lines
    │   ├── AttemptFailed             it was one that cannot be replaced: the attempt is over, another one may go on
    │   └── NodeLost                  its node has lost its devices: the run may go on, without that node
    └── Stalled                       nobody in the run gets on; says who waits for whom

All are picklable: made of one message (NodeLost of a node's name, too), they cross process borders unchanged.
"""

from __future__ import annotations


class ArealError(Exception):
    """Root of the tree."""


class UserError(ArealError, ValueError):
    """The person who started the run can mend this; the message says how."""


class ConfigError(UserError):
    """The configuration cannot be used as it is."""


class DevicesLost(UserError):
    """A process was given devices that are not there: its node is to be left out."""


class DataError(UserError):
    """A data set, model directory or prompt cannot be used."""


class RunDirError(UserError):
    """The run directory is in use, belongs to something else, or lacks what it should hold."""


class SubmissionError(UserError):
    """Slurm refused the job, or does not answer."""


class CheckpointError(UserError):
    """There is no checkpoint to load, or it does not fit this run."""


class WaitTimeout(ArealError, TimeoutError):
    """A bounded wait ended without what it waited for."""


class CorruptRecord(ArealError):
    """Stored bytes do not match their checksum."""


class CorruptDocument(CorruptRecord, ValueError):
    """A file that should hold a JSON document holds none: half of one, or other bytes."""


class Fenced(ArealError):
    """A newer attempt of this run has taken over; whoever sees this stops without publishing."""


class GenerationError(ArealError):
    """An engine could not answer a request; the sample counts as failed, never as wrong."""


class RequestRefused(GenerationError):
    """An engine says what is wrong with a request; it would say so again, and so would its like."""


class WeightUpdateError(ArealError):
    """An engine did not load a weight version completely; it must serve nothing until it is reloaded."""


class RewardError(ArealError):
    """A reward could not be computed; the sample counts as failed, never as reward 0."""


class RewardRaised(RewardError):
    """The reward function itself refused this text; no time limit and no dying process had a part in it."""


class AgentError(ArealError):
    """An agent did not get through its episode; the sample counts as failed, never as reward 0."""


class RoleDied(ArealError):
    """A process of this run ended before the run did."""


class AttemptFailed(RoleDied):
    """A process ended without which the attempt cannot go on, such as a trainer rank; the next one may."""


class NodeLost(RoleDied):
    """A node has lost the devices that a process was given there; the run may go on elsewhere."""

    def __init__(self, message: str, node: str = "") -> None:
        super().__init__(message, node)

    def __str__(self) -> str:
        return str(self.args[0])

    @property
    def node(self) -> str:
        """The node's name, as Slurm has it."""
        return str(self.args[1])


class Stalled(ArealError):
    """Work that the run needs has stood still for longer than it may."""
