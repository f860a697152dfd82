"""The profiles of sites: each resolves over the quickstart, seats every process and renders."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from areal_hpc.cluster.hetjob import job_of, render
from areal_hpc.cluster.plan import plan_lines
from areal_hpc.config.cluster import Shape
from areal_hpc.config.load import load
from areal_hpc.config.resolve import resolve
from areal_hpc.roles.supervisor import roles_of

CONFIGS = Path(__file__).parents[2] / "configs"
SITES = sorted((CONFIGS / "site").glob("*.yaml"))


@pytest.mark.parametrize("site", SITES, ids=lambda path: path.stem)
def test_a_site_says_its_command_and_can_be_planned_and_rendered(site: Path) -> None:
    first = site.read_text(encoding="utf-8").splitlines()[0]
    words = first.partition("areal-hpc submit ")[2].split()
    assert words[:2] == ["configs/quickstart.yaml", f"configs/site/{site.name}"]
    config = resolve(load([CONFIGS / "quickstart.yaml", site], words[2:]))
    assert config.cluster.shape is not Shape.LOCAL
    assert "generator-0 on GPU 0" in "\n".join(plan_lines(config, roles_of(config)))
    text = render(job_of(config, log="%j.log"), "true")
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
