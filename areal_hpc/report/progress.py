"""Where an attempt stands: the newest number of each kind, fed by its records. No history beyond ten steps."""

from __future__ import annotations

from collections import Counter, deque

from areal_hpc.report.drops import Drops
from areal_hpc.report.text import count, duration, number, one_line, percent, size
from areal_hpc.telemetry import Record

WINDOW = 10
"""Steps in a moving mean."""
RATE_AGE_S = 30.0
"""An engine that has said nothing for so long no longer counts in the generation rate, in seconds."""


class Progress:
    """What is known of one attempt so far. Every value is None until a record has brought it."""

    def __init__(self, total_steps: int | None) -> None:
        self.total_steps = total_steps
        self.last_time: float | None = None
        self.evaluation: Record | None = None
        self.drops = Drops()
        self._step: Record | None = None
        self._rewards: deque[float] = deque(maxlen=WINDOW)
        self._times: deque[tuple[int, float]] = deque(maxlen=WINDOW + 1)
        self._engines: dict[int, Record] = {}
        self._routing: dict[int, Record] = {}  # by rollout worker
        self._restarts = Counter[str]()
        self._service: Record | None = None

    def feed(self, record: Record) -> None:
        """Take in one record of any kind; those that say nothing of progress only move ``last_time``."""
        self.last_time = record.time if self.last_time is None else max(self.last_time, record.time)
        self.drops.feed(record)
        if record.kind == "step" and (step := record.number("step")) is not None:
            self._step = record
            self._times.append((int(step), record.time))
            if (reward := record.number("reward_mean")) is not None:
                self._rewards.append(reward)
        elif record.kind == "evaluation":
            self.evaluation = record
        elif record.kind == "generation":
            self._engines[record.index] = record
        elif record.kind == "routing":
            self._routing[record.index] = record
        elif record.kind == "service":
            self._service = record
        elif record.kind == "restart":
            self._restarts[str(record.values.get("process"))] += 1

    def latest(self, key: str) -> float | None:
        """``key`` of the newest step."""
        return None if self._step is None else self._step.number(key)

    @property
    def is_offline(self) -> bool:
        """Whether the newest step was trained on given answers."""
        return self._step is not None and bool(self._step.values.get("offline"))

    @property
    def step(self) -> int | None:
        return self._times[-1][0] if self._times else None

    @property
    def step_time(self) -> float | None:
        """When the newest step was recorded, in seconds since 1970."""
        return self._times[-1][1] if self._times else None

    @property
    def reward_moving(self) -> float | None:
        """Mean reward of the last ten steps."""
        return sum(self._rewards) / len(self._rewards) if self._rewards else None

    @property
    def generation_rate(self) -> float | None:
        """Tokens each second over all engines that still report."""
        newest = max((record.time for record in self._engines.values()), default=0.0)
        rates = [r.number("tokens_per_s") for r in self._engines.values() if newest - r.time <= RATE_AGE_S]
        known = [rate for rate in rates if rate is not None]
        return sum(known) if known else None

    def routing_text(self) -> str:
        """What each engine has to do, as the workers who still report have it, or why one of them gives it nothing."""
        newest = max((record.time for record in self._routing.values()), default=0.0)
        told = [record.values for record in self._routing.values() if newest - record.time <= RATE_AGE_S]
        texts = []
        for name in sorted({name for values in told for name in values}):
            said = [values[name] for values in told if name in values]
            troubles = [one_line(one) for one in said if isinstance(one, str)]
            tokens = sum(one for one in said if isinstance(one, int | float))
            texts.append(f"{name} is out: {troubles[0]}" if troubles else f"{name} {count(tokens)} tokens outstanding")
        return ", ".join(texts)

    @property
    def remaining_s(self) -> float | None:
        """Seconds to the last step, at the pace of the last ten."""
        if self.total_steps is None or not self._times:
            return None
        (first, began), (last, ended) = self._times[0], self._times[-1]
        pace = (ended - began) / (last - first) if last > first else self.latest("seconds_step")
        return None if pace is None else max(0.0, pace * (self.total_steps - last))

    def fields(self) -> dict[str, str]:
        """Name to text, in the order in which a person wants them; without step and times."""
        restarts = {"restarts": self._restarts_text()} if self._restarts else {}
        if self.is_offline:
            return {
                "loss": number(self.latest("loss")),
                "evaluation": evaluation_text(self.evaluation),
                "training": f"{count(self.latest('train_tokens_per_s'))} tokens/s",
                **restarts,
            }
        return {
            "reward": f"{number(self.latest('reward_mean'))} (mean of {WINDOW}: {number(self.reward_moving)})",
            "evaluation": evaluation_text(self.evaluation),
            "staleness": f"mean {number(self.latest('staleness_mean'))}, max {number(self.latest('staleness_max'))}",
            "generation": f"{count(self.generation_rate)} tokens/s",
            "training": f"{count(self.latest('train_tokens_per_s'))} tokens/s",
            "ring": f"{percent(self.latest('ring_fill'))} full{self._quota_text()}",
            "dropped": self.drops.text(),
            "weights": f"version {count(self.latest('version'))}{self._saved_text()}",
            **restarts,
            **({"service": service_text(self._service)} if self._service is not None else {}),
        }

    def _quota_text(self) -> str:
        """What the ring holds on the disk of what it may, where that is limited."""
        quota = self.latest("ring_max_bytes")
        return "" if quota is None else f", {size(self.latest('ring_bytes'))} of {size(quota)}"

    def _saved_text(self) -> str:
        """How much of the newest weights did not have to travel, where only changes do."""
        sent, saved = self.latest("weight_bytes"), self.latest("weight_bytes_saved")
        return (
            "" if sent is None or saved is None else f", {percent(saved / max(1.0, sent + saved))} of its bytes saved"
        )

    def _restarts_text(self) -> str:
        return ", ".join(f"{process} {times}" for process, times in sorted(self._restarts.items()))

    def step_text(self) -> str:
        return f"{count(self.step)} of {count(self.total_steps)}"

    def line(self, elapsed_s: float) -> str:
        """``fields`` in one line of plain text, short enough for a log."""
        parts = (
            f"step {count(self.step)}/{count(self.total_steps)}",
            *(self._offline_parts() if self.is_offline else self._online_parts()),
            f"{duration(elapsed_s)} elapsed, {duration(self.remaining_s)} left",
        )
        return " | ".join(parts)

    def _offline_parts(self) -> tuple[str, ...]:
        return (
            f"loss {number(self.latest('loss'))}",
            f"eval {evaluation_text(self.evaluation)}",
            f"tokens/s {count(self.latest('train_tokens_per_s'))} train",
        )

    def _online_parts(self) -> tuple[str, ...]:
        return (
            f"reward {number(self.latest('reward_mean'))} (mean {number(self.reward_moving)})",
            f"eval {evaluation_text(self.evaluation).partition(':')[0]}",
            f"staleness {number(self.latest('staleness_mean'))} max {number(self.latest('staleness_max'))}",
            f"tokens/s {count(self.generation_rate)} gen {count(self.latest('train_tokens_per_s'))} train",
            f"ring {percent(self.latest('ring_fill'))}",
            f"dropped {self.drops.text()}",
            f"version {count(self.latest('version'))}",
        )


def service_text(service: Record) -> str:
    """Where agents in daily use are served now: what their settings need, and where the page is."""
    url = service.values.get("url")
    return f"base_url {url}/v1 | api_key in {service.values.get('key_file')} | page {url}/"


def restart_text(restart: Record) -> str:
    """Who died, how, and what follows: the process again, or the run's next attempt."""
    process, reason, pause_s = restart.values.get("process"), restart.values.get("reason"), restart.number("pause_s")
    if process == "run":
        return f"{reason}; attempt {restart.epoch} goes on from the newest checkpoint"
    return f"{reason}; it is started again" + (f" in {number(pause_s)} s" if pause_s else "")


def evaluation_text(evaluation: Record | None) -> str:
    """What an evaluation measured (its mean reward, or its loss), or why it could not, and the step it belongs to."""
    if evaluation is None:
        return number(None)
    if (reason := evaluation.values.get("reason")) is not None:
        return f"failed at step {count(evaluation.number('step'))}: {one_line(str(reason))}"
    return f"{_measured(evaluation)} at step {count(evaluation.number('step'))}"


def _measured(evaluation: Record) -> str:
    if "loss" not in evaluation.values:
        return number(evaluation.number("reward_mean"))
    accuracy = f", accuracy {number(evaluation.number('accuracy'))}" if "accuracy" in evaluation.values else ""
    return f"loss {number(evaluation.number('loss'))}{accuracy}"
