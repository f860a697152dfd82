"""Fault 17: how a batch script has its job go on without nodes that have failed it; Slurm's commands are stand-ins."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_hetjob import config_of, last_part
from test_satellites import ARRAY, script

from areal_hpc.cluster.hetjob import job_of, render

LOSES = """bash -c 'echo $PPID >"$AREAL_HPC_AVOIDED.pid"; mkdir "$AREAL_HPC_AVOIDED";
  for node in n2 n2; do echo $node >>"$AREAL_HPC_AVOIDED/$node"; done; exit 71'"""
"""A launcher that finds a node without its devices."""
NAP = "case $1 in 1) /bin/sleep 0.2 ;; esac"
HOSTNAMES = """case "$2" in hostnames) echo "$3" | sed -E 's/n\\[(.)-(.)\\]/n\\1\\nn\\2/' | tr , "\\n" ;; esac"""


def shows(*excluded: str) -> str:
    """What Slurm says of a job, a line for each component."""
    lines = "\n".join(f"JobId=12 HetJobOffset=0 ReqNodeList=(null) ExcNodeList={one} NodeList=n1" for one in excluded)
    return f"""[ "$1 $2" = "show job" ] && echo '{lines}'\n{HOSTNAMES}\n"""


def asked(tmp_path: Path, text: str, **commands: str) -> tuple[int, list[str]]:
    """The exit code, and what Slurm was asked to do."""
    code, calls = last_part(tmp_path, text, signals="", sleep=NAP, **commands)
    wanted = [call.replace(f"{tmp_path}/", "") for call in calls if not call.startswith(("sleep", "scontrol show"))]
    return code, wanted


def training(room: Path, *words: str) -> str:
    return render(job_of(config_of(*words), log="%j.log", room=str(room)), LOSES)


def test_a_requeued_job_leaves_the_node_out_and_what_it_left_out_before(tmp_path: Path) -> None:
    code, calls = asked(tmp_path, training(tmp_path, "cluster.shape=split"), scontrol=shows("n[7-8],m1"))
    assert (code, calls) == (71, ["scontrol requeue 12", "scontrol update JobId=12 ExcNodeList=m1,n2,n7,n8"])


def test_the_same_node_is_named_once_however_often_the_job_goes_on(tmp_path: Path) -> None:
    _, calls = asked(tmp_path, training(tmp_path, "cluster.shape=split"), scontrol=shows("n2"))
    assert calls[1:] == ["scontrol update JobId=12 ExcNodeList=n2"]


def test_of_a_heterogeneous_job_each_component_leaves_out_what_it_did_and_the_node(tmp_path: Path) -> None:
    text = training(tmp_path, "cluster.shape=het").replace("umask 077", "SLURM_HET_SIZE=2")
    _, calls = asked(tmp_path, text, scontrol=shows("(null)", "n1"))
    assert calls == [
        "scontrol requeue 12",
        "scontrol update JobId=12+0 ExcNodeList=n2",
        "scontrol update JobId=12+1 ExcNodeList=n1,n2",
    ]


@pytest.mark.parametrize(
    ("words", "excluded", "options"),
    [
        (["cluster.shape=split"], ["(null)"], "--exclude=n2"),
        (["cluster.shape=het"], ["n9", "(null)"], "--exclude=n2,n9 : --exclude=n2"),
    ],
)
def test_the_next_job_of_a_chain_is_told_when_it_is_handed_in_and_tells_the_next(
    tmp_path: Path, words: list[str], excluded: list[str], options: str
) -> None:
    room = tmp_path / "a room"
    (room / "12").mkdir(parents=True)
    (room / "12/12_submitted.pkl").touch()
    text = training(room, "cluster.requeue=false", *words)
    code, calls = asked(tmp_path, text, scontrol=shows(*excluded), sbatch="echo 13")
    depends = "sbatch --parsable --dependency=afterany:12 --export=ALL,AREAL_HPC_AFTER=12"
    assert (code, calls) == (0, [f"{depends} {options} script word"])
    assert (room / "avoided-13/n2").is_file()


@pytest.mark.parametrize("requeue", ["true", "false"])
def test_a_satellite_leaves_it_out_and_no_other_of_its_array(tmp_path: Path, requeue: str) -> None:
    text = script(f"cluster.requeue={requeue}", command=LOSES, room=str(tmp_path))
    text = text.replace("umask 077", "\n".join(f"{name}={value}" for name, value in ARRAY.items()))
    code, calls = asked(tmp_path, text, scontrol=shows("(null)"), sbatch="echo 77")
    if requeue == "true":
        assert (code, calls) == (71, ["scontrol requeue 12_3", "scontrol update JobId=12_3 ExcNodeList=n2"])
        return
    assert (code, calls) == (0, ["sbatch --parsable --array=3 --exclude=n2 script word"])
    assert (tmp_path / "avoided-77_3/n2").is_file()


ENDS_THE_ASKING = """
if [ "$1" = {verb} ] && [ ! -e "$0.ended" ]; then
  touch "$0.ended"
  kill -TERM "$(cat {room}/avoided-12.pid)" "$PPID" $$
  /bin/sleep 5
fi
"""


@pytest.mark.parametrize("verb", ["requeue", "update"])
def test_slurm_takes_the_job_back_and_ends_the_script_while_it_asks(tmp_path: Path, verb: str) -> None:
    """Its SIGTERM goes to every process of the job, once; that which asks is one."""
    scontrol = shows("(null)") + ENDS_THE_ASKING.format(verb=verb, room=tmp_path)
    code, calls = asked(tmp_path, training(tmp_path, "cluster.shape=split"), scontrol=scontrol)
    update = "scontrol update JobId=12 ExcNodeList=n2"
    assert (code, calls) == (71, ["scontrol requeue 12", *([update] * (2 if verb == "update" else 1))])


def test_a_site_that_lets_no_user_change_a_job_is_heard_and_the_job_goes_on_all_the_same(tmp_path: Path) -> None:
    refuses = shows("(null)") + '[ "$1" = update ] && { echo "Access/permission denied" >&2; exit 1; }\ntrue'
    code, calls = asked(tmp_path, training(tmp_path, "cluster.shape=split"), scontrol=refuses)
    assert code == 71
    assert calls == ["scontrol requeue 12", *["scontrol update JobId=12 ExcNodeList=n2"] * 2]


def test_what_slurm_ends_by_itself_is_not_asked_for(tmp_path: Path) -> None:
    """A person's cancel, and the loss of a node, at one moment."""
    loses = LOSES.replace("exit 71", 'kill -TERM "$PPID"; sleep 0.2; exit 71')
    text = training(tmp_path, "cluster.shape=split").replace(LOSES, loses)
    assert asked(tmp_path, text, scontrol=shows("(null)")) == (71, [])
