"""``areal-hpc plan``: all that can be known of a run before it is submitted, on a login node and without torch.

who sits where        plan.py, from the configuration alone; what cannot be is an error
how it is split       requirements.py of the Megatron trainer, from the model's config.json; likewise
how large it is       estimate.py and host_memory.py, from the model's config.json
what is missing       provisions.py, from the disk
what Slurm thinks     site.py and sbatch --test-only, where there is one
"""

from __future__ import annotations

from pathlib import Path

from areal_hpc.cluster.components import components_of
from areal_hpc.cluster.estimate import estimate_lines, gpu_name
from areal_hpc.cluster.hetjob import job_of, render
from areal_hpc.cluster.host_memory import host_lines
from areal_hpc.cluster.jobs import verdict
from areal_hpc.cluster.plan import plan_lines
from areal_hpc.cluster.satellites import render_satellite, satellite_job
from areal_hpc.cluster.site import require_startable
from areal_hpc.config.cluster import Shape
from areal_hpc.config.schema import Config, TrainerBackendName
from areal_hpc.roles.provisions import missing
from areal_hpc.roles.supervisor import roles_of
from areal_hpc.training.megatron.requirements import check_model


def plan_run(config: Config) -> tuple[list[str], bool]:
    """The plan, a line each, and whether nothing stands against it.

    Raises:
        ConfigError: it cannot be; names the quantity that is missing, or that does not divide what it splits.
        DataError: the Megatron trainer does not compute the model.
        SubmissionError: Slurm does not answer in time.
    """
    require_startable(config)
    _require_split(config)
    roles = roles_of(config)
    lines = list(plan_lines(config, roles))
    lines += estimate_lines(config, gpu_name(components_of(config)[0].request))
    lines += host_lines(config, roles)
    lacks = list(missing(config))
    lines += [f"missing      {one}" for one in lacks]
    scripts = {"sbatch": render(job_of(config, log="%j.log", directory=Path.cwd()), "true")}
    if config.cluster.shape is Shape.SATELLITES:
        job = satellite_job(config, log="%j.log", directory=Path.cwd())
        scripts["satellites"] = render_satellite(job, "true")
    verdicts = {name: verdict(script) for name, script in scripts.items()}
    lines += [f"{name:<12} {said}" for name, (_, said) in verdicts.items()]
    return lines, all(possible for possible, _ in verdicts.values()) and not lacks


def _require_split(config: Config) -> None:
    """Refuse a layout that the model does not allow, where the model is on this machine."""
    model, trainer = Path(config.model.path), config.trainer
    if trainer.backend is TrainerBackendName.MEGATRON and (model / "config.json").is_file():
        check_model(model, trainer.parallel, config.model.lora, fp8=trainer.fp8)
