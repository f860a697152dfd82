"""The web page in a real browser: what a person sees of sessions and of the curve, live and after the run's end."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dialogues import said
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait
from served import ADMIN, Served, served

from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.proxy.chronicle import Chronicle, Scribe, summary_of, turns_of
from areal_hpc.proxy.page import Board, show
from areal_hpc.proxy.sessions import Session
from areal_hpc.report.course import Course
from areal_hpc.run_dir import RunDir
from areal_hpc.telemetry import Recorder
from areal_hpc.types import Completion, GenerationRequest, StopReason

LIMIT_S = 60.0
HOSTILE = "<img src=x onerror=\"document.title='broken into'\"><script>document.title='broken into'</script>"
NEEDED = ("chromium", "chromedriver")
pytestmark = pytest.mark.skipif(
    "AREAL_HPC_NEED_BROWSER" not in os.environ and not all(map(shutil.which, NEEDED)),
    reason=f"needs {' and '.join(NEEDED)}, which tests/run installs on Debian",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    home = tmp_path_factory.mktemp("browser")
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1440,1100",
        "--force-prefers-color-scheme=light", f"--user-data-dir={home}",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver") or "chromedriver")
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """A run of twelve steps, of which the trainer's records tell."""
    run = RunDir.create(tmp_path / "my-run")
    run.config.write_text("trainer: {total_steps: 20}\n", encoding="utf-8")
    (run.secrets / "token").write_text(ADMIN, encoding="ascii")
    attempt = run.attempt(1).create()
    recorder = Recorder(attempt.records("trainer", 0), role="trainer", index=0, epoch=1)
    for step in range(1, 13):
        recorder.record("step", {"step": step, "reward_mean": step / 12, "staleness_max": step % 3})
    recorder.record("evaluation", {"step": 8, "reward_mean": 0.75, "samples": 9})
    recorder.close()
    return run


class Background:
    """Runs a service in a thread of its own, since the browser is driven by blocking calls."""

    def __init__(self, scenario: Callable[[Background], Any]) -> None:
        self.loop = asyncio.new_event_loop()
        self.done = asyncio.Event()
        self.is_up = threading.Event()
        self.url = ""
        self.service: Served | None = None
        self._thread = threading.Thread(target=lambda: self.loop.run_until_complete(scenario(self)))
        self._thread.start()
        assert self.is_up.wait(LIMIT_S)

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(LIMIT_S)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.done.set)
        self._thread.join(LIMIT_S)
        self.loop.close()


@contextmanager
def background(scenario: Callable[[Background], Any]) -> Iterator[Background]:
    made = Background(scenario)
    try:
        yield made
    finally:
        made.close()


def by_versions(dialogue: ChatRenderer, text: str) -> Callable[[GenerationRequest], Completion]:
    """An engine's answer of which the first half was sampled by weights 3, the second by 4."""

    def answer(_: GenerationRequest) -> Completion:
        ids = said(dialogue, text)
        half = len(ids) // 2
        return Completion(
            token_ids=np.array(ids, dtype=np.int32),
            logprobs=np.linspace(0.0, -4.0, len(ids), dtype=np.float32),
            versions=np.array([3] * half + [4] * (len(ids) - half), dtype=np.int32),
            stop=StopReason.STOP,
        )

    return answer


def find(browser: webdriver.Chrome, css: str) -> WebElement:
    return WebDriverWait(browser, LIMIT_S).until(
        lambda _: next(iter(browser.find_elements(By.CSS_SELECTOR, css)), None)
    )


def wait_for(browser: webdriver.Chrome, ready: Callable[[], Any]) -> Any:
    return WebDriverWait(browser, LIMIT_S).until(lambda _: ready())


def log_in(browser: webdriver.Chrome, url: str, token: str) -> None:
    browser.get(url)
    browser.execute_script("sessionStorage.clear()")
    browser.get(url)
    find(browser, "#token").send_keys(token, Keys.ENTER)


def complaints(browser: webdriver.Chrome) -> list[str]:
    """What is wrong by the browser's console."""
    expected = ("401", "ERR_CONNECTION_REFUSED")  # that a test has asked for; from the service before, which has ended
    messages = [entry["message"] for entry in browser.get_log("browser")]
    return [message for message in messages if not any(one in message for one in expected)]


def luminance(colour: str) -> float:
    """WCAG 2.2's relative luminance of ``rgb(r, g, b)``."""
    parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(token: Mapping[str, str]) -> float:
    front, back = luminance(token["ink"]), luminance(token["colour"])
    return (max(front, back) + 0.05) / (min(front, back) + 0.05)


def seen_tokens(browser: webdriver.Chrome) -> list[dict[str, str]]:
    """Each token of the answers as it is shown."""
    tokens: list[dict[str, str]] = browser.execute_script(
        """return [...document.querySelectorAll(".answer span")].map(span => ({
            text: span.textContent.replaceAll("\\u200b", ""), version: span.dataset.version, title: span.title,
            colour: getComputedStyle(span).backgroundColor, ink: getComputedStyle(span).color}))"""
    )
    return tokens


def test_a_live_run_shows_its_sessions_as_they_go_on(
    browser: webdriver.Chrome, hermes: ChatRenderer, run_dir: RunDir
) -> None:
    text = f"Today is 今日 {HOSTILE}"

    async def scenario(here: Background) -> None:
        sessions: list[Session] = []
        board = Board(
            name="my-run",
            chronicle=Chronicle(run_dir.sessions),
            curve=Course(run_dir).told,
            live=lambda: sessions,
            spelled=hermes.spelled,
            worker="rollout-0",
            others=lambda: {"rollout-1": "http://127.0.0.1:9/"},
        )
        async with served(hermes, by_versions(hermes, text), board=board) as service:
            sessions.append(service.session)
            here.service, here.url = service, service.url
            here.is_up.set()
            await here.done.wait()

    with background(scenario) as here:
        service = here.service
        assert service is not None
        log_in(browser, here.url, "not-the-token")
        assert "not the token" in wait_for(browser, lambda: find(browser, "#refused").text)
        assert not find(browser, "#board").is_displayed()

        log_in(browser, here.url, ADMIN)
        wait_for(browser, lambda: find(browser, "#board").is_displayed())
        assert find(browser, "#run").text == "my-run"
        assert "step 12 of 20" in find(browser, "#plot-text").text
        assert len(browser.find_elements(By.CSS_SELECTOR, "#plot .evaluation")) == 1
        row = find(browser, "#sessions tr")
        assert "open" in row.text
        assert "these by rollout-0. Others: rollout-1" in find(browser, "#others").text
        assert find(browser, "#others a").get_attribute("href") == "http://127.0.0.1:9/"

        here.call(service.chat("What day is it?"))
        wait_for(browser, lambda: find(browser, "#sessions tr").text.split()[1] == "1")  # it came by itself
        find(browser, "#sessions button").send_keys(Keys.ENTER)  # by keyboard
        wait_for(browser, lambda: browser.find_elements(By.CSS_SELECTOR, ".answer span"))
        tokens = seen_tokens(browser)
        assert len(tokens) == service.session.transcript.turns[0].completion.token_ids.size
        assert "".join(token["text"] for token in tokens) == text + "<|im_end|>"
        colours = {version: {t["colour"] for t in tokens if t["version"] == version} for version in ("3", "4")}
        assert all(len(one) == 1 for one in colours.values()) and colours["3"] != colours["4"]
        assert min(contrast(token) for token in tokens) >= 4.5
        legend = [entry.text for entry in browser.find_elements(By.CSS_SELECTOR, "#legend > span")]
        assert legend == ["step 3", "step 4"]
        assert "What day is it?" in find(browser, ".said").text

        Select(find(browser, "#by")).select_by_value("logprob")
        tokens = seen_tokens(browser)
        assert tokens[0]["colour"] == "rgb(255, 255, 255)" and len({token["colour"] for token in tokens}) > 50
        assert tokens[-1]["title"].endswith("log-prob -4, probability 1.8 %")
        assert min(contrast(token) for token in tokens) >= 4.5

        here.call(service.post("/rl/set_reward", {"reward": 0.5}))
        wait_for(browser, lambda: "reward 0.5" in find(browser, "#about").text)
        here.call(service.chat("And tomorrow?"))
        wait_for(browser, lambda: len(browser.find_elements(By.CSS_SELECTOR, ".turn")) == 2)
        assert browser.title == "my-run | areal-hpc" and complaints(browser) == []


def test_a_run_that_has_ended_shows_what_is_written_of_it(
    browser: webdriver.Chrome, hermes: ChatRenderer, run_dir: RunDir
) -> None:
    async def play() -> None:
        scribe = Scribe(run_dir.sessions, "00000001-rollout-0-0")
        async with served(hermes, by_versions(hermes, "yes, it is")) as service:
            await service.chat("Is it?")
            service.session.reward(1.0)
            said_of_it = {"outcome": "sealed", "reason": "", "group": ""}
            scribe.write(
                {
                    "summary": summary_of(service.session, said_of_it, 1.0),
                    "turns": turns_of(service.session, hermes.spelled, 1.0),
                }
            )
        scribe.close()

    asyncio.run(play())

    async def scenario(here: Background) -> None:
        board = Board(name="my-run", chronicle=Chronicle(run_dir.sessions), curve=Course(run_dir).told)
        async with show(board, ADMIN) as url:
            here.url = url
            here.is_up.set()
            await here.done.wait()

    with background(scenario) as here:
        log_in(browser, here.url, ADMIN)
        assert wait_for(browser, lambda: find(browser, "#state").text) == "as its files tell"
        assert not find(browser, "#others").is_displayed()
        row = find(browser, "#sessions tr").text
        assert "3 to 4" in row and "sealed" in row
        find(browser, "#sessions button").click()
        wait_for(browser, lambda: browser.find_elements(By.CSS_SELECTOR, ".answer span"))
        assert "worth 1" in find(browser, ".turn").text
        assert complaints(browser) == []
