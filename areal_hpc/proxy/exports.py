"""A session as JSON: its turns readably, and the trajectories that it makes."""

from __future__ import annotations

from typing import Any

from areal_hpc.proxy.sessions import Session
from areal_hpc.types import Trajectory


def exported(session: Session, discount: float) -> dict[str, Any]:
    """Turns, drifts and trajectories of a session; none of the latter where an answer broke off."""
    turns = [
        {
            "interaction_id": turn.call,
            "parent": turn.place.parent,
            "drift": turn.place.drift,
            "messages": list(turn.messages),
            "stop": turn.completion.stop,
        }
        for turn in session.transcript.turns
    ]
    trajectories = [] if session.broken else session.trajectories(discount)
    return {
        "session_id": session.id,
        "broken": session.broken,
        "drifts": dict(session.transcript.drifts),
        "turns": turns,
        "trajectories": [_record(trajectory) for trajectory in trajectories],
    }


def _record(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "token_ids": trajectory.token_ids.tolist(),
        "loss_mask": trajectory.loss_mask.tolist(),
        "logprobs": trajectory.logprobs.tolist(),
        "versions": trajectory.versions.tolist(),
        "reward": trajectory.reward,
        "stop": trajectory.stop,
    }
