"""How a batch script has its job go on: one text for runs and satellites, rendered by a pure function.

    again             where a site requeues: the same job; elsewhere a new one, with the same script and arguments
    again HOLD        the same, held: the argument is scontrol's or sbatch's own word for it

It is the one place that does, and it does so once. Nodes that have failed the job are named, a file each, in the
directory that ``AVOIDED`` names (``liveness/left_out.py`` makes them), and are left out from then on: a requeued job is
changed while it waits in the queue, which is when Slurm lets its owner do that; a new one is told by sbatch. What a
component left out before, it still leaves out.
"""

from __future__ import annotations

import shlex

AVOIDED = "AREAL_HPC_AVOIDED"

HEAD = """\
# By the numbers of array and task: the last task's own number is that of the whole array.
me=$SLURM_JOB_ID
[ -z "${{SLURM_ARRAY_JOB_ID:-}}" ] || me=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID

# In this directory the run names nodes that have failed it. They and those of before, of each component a line:
export {avoided}={file}"$me"
left_out() {{
  local before
  [ -d "${avoided}" ] || return 0
  patiently scontrol show job -o "$me" | grep -oE ' ExcNodeList=[^ ]+' | cut -d= -f2 | while read -r before; do
    {{ [ "$before" = "(null)" ] || scontrol show hostnames "$before"; cat "${avoided}"/*; }} | sort -u | paste -sd,
  done
}}

# The one place that has this job go on, once.
"""
REQUEUE = """\
asked=""
again() {
  [ -z "$asked" ] || return 0
  local all nodes component=0
  all=$(left_out)
  asked=$(patiently scontrol "${1:-requeue}" "$me" && echo requeued) || [ "$ending" = term ] || return
  # Slurm changes a job only when it has it back. Meanwhile it ends this script, and what that has asked: so again.
  for nodes in $all; do
    for _ in 1 2; do
      patiently scontrol update JobId="$me${SLURM_HET_SIZE:+"+$component"}" ExcNodeList="$nodes" >/dev/null && break
    done
    component=$((component + 1))
  done
  return 0
}
"""
SUBMIT = """\
asked="" words=("$@")
again() {{
  [ -z "$asked" ] || return 0
  local nodes except=()
  for nodes in $(left_out); do except+=(${{except[0]:+:}} --exclude="$nodes"); done
  asked=$(patiently sbatch --parsable {options} "$@" \\
    "${{except[@]}}" "$0" "${{words[@]}}")
  asked=$(grep -m1 -oE '^[0-9]+' <<<"$asked") || return 1
  [ ! -d "${avoided}" ] ||
    cp -r "${avoided}" {file}"$asked${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}"
{handover}
  echo "areal-hpc: {said}"
}}
"""


def render_again(*, requeue: bool, room: str, options: str, handover: str, said: str) -> str:
    """The function ``again`` of a batch script; it needs ``patiently`` (hetjob.py).

    Args:
        requeue: whether the site does.
        room: directory for what the job leaves; empty for a script that a person types, which has the one that it is
            typed in.
        options: what sbatch is told of a new job, as shell words.
        handover: shell lines for when there is a new job, whose number is ``$asked``; may be empty.
        said: what the log says then.
    """
    facts = {"avoided": AVOIDED, "file": f"{shlex.quote(room)}/avoided-" if room else '"$PWD"/areal-hpc-avoided-'}
    head = HEAD.format(**facts)
    if requeue:
        return head + REQUEUE
    text = SUBMIT.format(options=options, handover=handover.rstrip(), said=said, **facts)
    return head + text.replace("\n\n", "\n")
