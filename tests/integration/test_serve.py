"""``areal-hpc serve``: a person uses the model and the run learns from it, through a kill, a stop and a resume."""

from __future__ import annotations

import json
import re
import signal
import stat
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from launched import GROUPS, STEPS, Launched, launched, newest_checkpoint, num_consumed, until
from tiny_models import make_model

from areal_hpc.exits import EXIT_STOPPED
from areal_hpc.fs import read_json
from areal_hpc.journal import Kind, entries
from areal_hpc.proxy.chronicle import Chronicle
from areal_hpc.report import prove_run
from areal_hpc.report.course import Course

NO_RULE = ('rollout.reward=""', "agent.online.reward_wait_s=30.0", "checkpoint.every_steps=1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("model")
    make_model(directory, "qwen3", seed=3)
    return directory


class Person:
    """Whoever uses the agent: its settings are the address that is printed and the key in the file that is named."""

    def __init__(self, started: Launched) -> None:
        self._started = started
        self.asked = 0
        until("the line that tells where the service is", self._is_told)

    def _is_told(self) -> bool:
        assert self._started.process.poll() is None, self._started.text
        return "base_url" in self._started.text

    def settings(self) -> tuple[str, str]:
        text = self._started.text
        *_, (url, key_file) = re.findall(r"base_url (\S+)/v1 \| api_key in (\S+) \|", text)
        assert stat.S_IMODE(Path(key_file).stat().st_mode) == 0o600
        return url, Path(key_file).read_text()

    def post(self, path: str, body: Any) -> Any:
        url, key = self.settings()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def episode(self) -> str:
        """Two turns and a reward; the id of the second answer."""
        messages: list[Any] = [{"role": "user", "content": f"question {self.asked}"}]
        for more in ("go on", ""):
            answer = self.post("/v1/chat/completions", {"messages": messages, "max_tokens": 8})
            text = answer["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": more}]
        self.asked += 1
        self.post("/rl/set_reward", {"reward": float(len(set(text)) % 3)})
        self.post("/rl/start_session", {})
        return str(answer["id"])

    def use(self, until_step: int) -> None:
        """Use the agent until the run has made a step; a request that breaks off with its service is asked again."""

        def reached() -> bool:
            assert self._started.process.poll() is None or until_step == STEPS, self._started.text
            if any(record.number("step") >= until_step for record in self._started.records("step")):
                return True
            try:
                self.episode()
            except (urllib.error.URLError, ConnectionError):
                return False
            return False

        until(f"step {until_step}", reached)


@pytest.mark.long
def test_fault_24_a_service_that_hangs_in_a_file_call_is_named_though_nothing_waits_for_it_and_ends_the_attempt(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heart of its process beats, and the trainer may wait for agents as long as it likes."""
    monkeypatch.setenv("HANG_ON_REQUEST", "yes")
    limits = ("limits.quiet_s=3", "limits.stall_s=7", "limits.stop_s=5", "limits.attempts=0")
    with launched(tmp_path, model, *NO_RULE, *limits, command="serve") as started:
        person = Person(started)
        started.hangs("rollout-0").write_text("heartbeat")
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            person.episode()
        assert started.wait(limit_s=60.0) == 70, started.text
        assert started.left_over() == []
    hung = rf"at rollout-0:\n.*\n<- rollout-0 waits for the file system: \w+ing {started.run.root}/"
    assert re.search(hung, started.text), started.text


def test_a_run_learns_from_whoever_uses_its_model_through_a_kill_a_stop_and_a_resume(
    tmp_path: Path, model: Path
) -> None:
    with launched(tmp_path, model, *NO_RULE, command="serve") as started:
        person = Person(started)
        person.use(until_step=1)
        first = person.settings()
        started.roles()["rollout-0"].send_signal(signal.SIGKILL)
        until("the service to be told anew", lambda: person.settings()[0] != first[0])
        assert person.settings()[1] == first[1]  # H17: it is another address, and the key is still the person's
        person.use(until_step=2)
        started.process.send_signal(signal.SIGINT)
        assert started.wait() == EXIT_STOPPED, started.text
    run = started.run
    stopped_at = newest_checkpoint(run).version.step
    assert 2 <= stopped_at < STEPS

    with launched(tmp_path, model, *NO_RULE, "--resume", command="serve") as started:
        person = Person(started)
        assert person.settings()[1] == first[1]
        person.use(until_step=STEPS)
        assert started.wait() == 0, started.text

    assert num_consumed(run) == STEPS * GROUPS
    proof = prove_run(run)
    assert proof.proven, proof.facts()
    kept = [(epoch, entry) for epoch in (1, 2) for entry in entries(run, epoch) if entry.kind is Kind.STEP]
    trained = [one for epoch, entry in kept if epoch == 2 or entry.step <= stopped_at for one in entry.trained]
    assert len(trained) == STEPS * GROUPS == len({(one.chain, one.ticket) for one in trained})

    steps = started.records("step")
    assert max(record.number("staleness_max") for record in steps) <= 1
    fresh = [record for record in steps if record.number("staleness_max") == 0]
    # Tokens and log-probs are the engine's; later, the trainer has other weights than it had.
    assert fresh and max(record.number("logprob_gap_max") for record in fresh) < 1e-4
    assert any(record.number("grad_norm") for record in steps)  # a lone episode has a signal all the same

    written = Chronicle(run.sessions)
    written.poll()
    sealed = [one for one in written.summaries() if one["outcome"] == "sealed"]
    assert len(sealed) >= STEPS * GROUPS and all(one["turns"] == 2 for one in sealed)
    assert Course(run).told()["steps"] == list(range(1, STEPS + 1))
    assert person.settings()[1] not in started.text
    assert read_json(run.summary)["outcome"] == "finished"
