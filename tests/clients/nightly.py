"""Every client, unmodified from its registry, does a task with a tool against the service, whole and streamed.

    PYTHONPATH=.:tests python tests/clients/nightly.py [--only openai langgraph] [--cache DIR]

Each client has an environment of its own in the cache directory, made from the install line of its example: the newest
version that there is, once for each day. Prints a table, writes ``nightly.json`` beside this file, where the rows of
clients that were not chosen stay, and exits with 1 if a client failed, or anything else would be trained than what was
sampled. What CI affords of it is
``tests/examples/test_agent_clients.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clients.cases import CASES, EXAMPLES, Case
from clients.exchange import LIMIT_S, exchange, faults
from dialogues import make_dialogue

from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.errors import ArealError
from areal_hpc.proxy.agent import command_agent

ROOT = Path(__file__).resolve().parents[2]
DRIVE = Path(__file__).with_name("drive.py")
INSTALL = re.compile(r"^\W*((?:pip|npm) install .+)$", re.MULTILINE)
INSTALL_LIMIT_S = 1800.0
COLUMNS = {"client": 34, "version": 12, "turns": 6, "clean": 6, "realign": 8, "fork": 5, "sampled": 8, "trained": 8}


def source_of(client: str) -> Path:
    return next((EXAMPLES / client).glob("calculator_agent.*"))


def install_line(client: str) -> Sequence[str]:
    """The words of the command with which a user installs the client, from its example."""
    found = INSTALL.search(source_of(client).read_text(encoding="utf-8"))
    assert found is not None, f"{client}: its example does not say how to install it"
    return shlex.split(found.group(1))


def environment_of(client: str, cache: Path) -> Path:
    """The directory of the client's environment, made where it is missing."""
    tool, _, *packages = install_line(client)
    directory = cache / f"{client}-{datetime.date.today():%Y%m%d}"
    done = directory / "installed"
    if done.exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    line = ["npm", "install", "--no-audit", "--no-fund", *packages]
    if tool == "pip":
        subprocess.run([sys.executable, "-m", "venv", directory], check=True, timeout=INSTALL_LIMIT_S)
        line = [str(directory / "bin/pip"), "install", "-q", "--disable-pip-version-check", *packages]
    subprocess.run(line, cwd=directory, check=True, timeout=INSTALL_LIMIT_S, stdout=subprocess.DEVNULL)
    done.touch()
    return directory


def version_of(client: str, directory: Path) -> str:
    """Of the first package of the install line."""
    tool, _, package, *_ = install_line(client)
    package = package.removesuffix("@latest")
    if tool == "npm":
        manifest = json.loads((directory / "node_modules" / package / "package.json").read_text(encoding="utf-8"))
        return str(manifest["version"])
    code = f"import importlib.metadata as m; print(m.version({package.partition('[')[0]!r}))"
    told = subprocess.run([directory / "bin/python", "-c", code], check=True, capture_output=True, text=True)
    return told.stdout.strip()


def command_of(case: Case, directory: Path) -> Sequence[str]:
    source = source_of(case.client)
    if source.suffix == ".mjs":
        linked = directory / source.name  # node looks for packages beside the script
        linked.write_bytes(source.read_bytes())
        path = f"PATH={directory}/node_modules/.bin:{os.environ['PATH']}"  # some bring a node of their own
        return ["env", path, "node", str(linked), json.dumps(case.args)]
    return [str(directory / "bin/python"), str(DRIVE), str(source.parent), json.dumps(case.args)]


async def row_of(case: Case, directory: Path, dialogue: ChatRenderer) -> dict[str, Any]:
    """One line of the table; its ``fault`` is empty if all is well."""
    today = f"{datetime.date.today()}"
    version = version_of(case.client, directory)
    row: dict[str, Any] = {"client": case.name, "version": version, "date": today, "fault": ""}
    try:
        agent = command_agent(command_of(case, directory), ("HERMES_HOME",))
        one = await asyncio.wait_for(exchange(case, dialogue, agent), LIMIT_S)
    except (ArealError, TimeoutError) as error:
        return {**row, "fault": f"{type(error).__name__}: {error}"}
    return {
        **row,
        **{name: one.drifts[name] for name in ("turns", "clean", "realign", "fork")},
        "sampled": sum(map(len, one.sampled)),
        "trained": sum(trajectory.num_generated for trajectory in one.trajectories),
        "fault": "; ".join(faults(one, case, dialogue)),
    }


def line_of(row: Mapping[str, Any]) -> str:
    cells = [str(row.get(name, "")).ljust(width) for name, width in COLUMNS.items()]
    return " ".join([*cells, row["fault"] or "ok"])


def _keep(rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows down, in the place of earlier ones of the same cases; those of cases that are no more go."""
    path = Path(__file__).with_suffix(".json")
    known = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    newest = {row["client"]: row for row in (*known, *rows)}
    kept = [newest[case.name] for case in CASES if case.name in newest]
    path.write_text(json.dumps({"rows": kept}, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    clients = list(dict.fromkeys(case.client for case in CASES))
    parser.add_argument("--only", nargs="+", choices=clients, default=clients)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "areal_hpc" / "clients")
    chosen = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)  # the examples read the task's rules from the library
    rows = []
    print(line_of({name: name for name in (*COLUMNS, "fault")}))
    with tempfile.TemporaryDirectory(prefix="areal-clients-") as scratch:
        os.environ["HERMES_HOME"] = f"{scratch}/hermes"
        dialogue = make_dialogue(Path(scratch), "hermes")
        for case in CASES:
            if case.client in chosen.only:
                rows.append(asyncio.run(row_of(case, environment_of(case.client, chosen.cache), dialogue)))
                print(line_of(rows[-1]), flush=True)
    _keep(rows)
    return 1 if any(row["fault"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
