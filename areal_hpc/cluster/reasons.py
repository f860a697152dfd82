"""Why Slurm lets a job wait, in words, and what a person can do about it (squeue(1), JOB REASON CODES)."""

from __future__ import annotations

from collections.abc import Mapping

NOTHING = "nothing to do but wait"
SMALLER = "ask for fewer nodes or a shorter time, which fit into gaps"
LIMITS = "wait for your other jobs, or ask for less; `sacctmgr show assoc` and `sacctmgr show qos` show the limits"

REASONS: Mapping[str, tuple[str, str]] = {
    "Priority": ("jobs with a higher priority come first", f"{NOTHING}, or {SMALLER}"),
    "Resources": ("it is next, and waits for nodes to become free", f"{NOTHING}, or {SMALLER}"),
    "BeginTime": (
        "its earliest start has not come; a job that was requeued rests for a while (two minutes by default)",
        NOTHING,
    ),
    "Dependency": ("it waits for another job to end", "`scontrol show job` names it; the next job of a chain waits so"),
    "DependencyNeverSatisfied": (
        "the job that it waits for ended in a way that it will never start",
        "cancel it with `areal-hpc stop`, and submit it again without cluster.dependency",
    ),
    "JobHeldUser": ("it is held by its owner", "`scontrol release` lets it go"),
    "JobHeldAdmin": ("it is held by an administrator", "ask your site's support why"),
    "job requeued in held state": ("it was requeued too often, or into a hold", "`scontrol release` lets it go"),
    "launch failed requeued held": (
        "it could not be launched on its nodes, and is held",
        "`scontrol release` lets it go; tell your site's support which nodes, if it happens again",
    ),
    "ReqNodeNotAvail": (
        "nodes that it could run on are down, drained or reserved for maintenance",
        "ask for a time limit that ends before the maintenance (`scontrol show reservation`), or other nodes",
    ),
    "Reservation": ("it waits for its reservation to begin", "`scontrol show reservation` shows when"),
    "ReservationDeleted": ("its reservation is gone", "submit it without cluster.all.reservation"),
    "PartitionNodeLimit": ("its partition never gives so many nodes", "lower the nodes, or choose another partition"),
    "PartitionTimeLimit": (
        "its partition never gives so much time",
        "lower cluster.all.time: the run chains or requeues",
    ),
    "PartitionDown": ("its partition starts no jobs", f"{NOTHING}, or choose another partition"),
    "PartitionInactive": ("its partition is out of service", "choose another partition"),
    "BadConstraints": (
        "no nodes have what it asks for, or it leaves out all that have",
        "change constraint, gres or mem (`sinfo -o '%P %f %G %m'`); or, once such nodes are mended, ExcNodeList with "
        "`scontrol update`, and `scontrol release` it",
    ),
    "NodeDown": ("a node that it names is down", "remove cluster.all.nodelist"),
    "InvalidAccount": ("its account is not valid", "set cluster.all.account; `sacctmgr show assoc user=$USER`"),
    "InvalidQOS": ("its quality of service is not valid", "set cluster.all.qos; `sacctmgr show qos`"),
    "AccountNotAllowed": ("its account may not use the partition", "set another account or partition"),
    "QOSNotAllowed": ("its quality of service may not use the partition", "set another qos or partition"),
    "Licenses": ("it waits for a licence", NOTHING),
    "JobArrayTaskLimit": ("its array runs as many tasks as it may", NOTHING),
    "NonZeroExitCode": ("it is held, since it failed before", "look into its log, then submit it again"),
    "RaisedSignal": ("it is held, since a signal ended it before", "look into its log, then submit it again"),
    "SystemFailure": ("a fault of Slurm, the file system or the network", "tell your site's support"),
    "Cleaning": ("its last incarnation is being cleaned up", NOTHING),
    "Prolog": ("its nodes are being prepared", NOTHING),
    "BurstBufferResources": ("it waits for room in a burst buffer", NOTHING),
    "FedJobLock": ("the clusters of the federation agree on who runs it", NOTHING),
    "MaxJobsPerAccount": ("its account runs as many jobs as it may", LIMITS),
    "AssociationJobLimit": ("its account runs as many jobs as it may", LIMITS),
}
"""Reason to what it means and what to do."""

FAMILIES: Mapping[str, tuple[str, str]] = {
    "QOSGrp": ("all jobs of its quality of service together use as much as they may", LIMITS),
    "QOSMax": ("it asks for more than its quality of service gives to one job or user", LIMITS),
    "QOSMin": ("it asks for less than its quality of service is meant for", "ask for more, or set another qos"),
    "QOS": ("a limit of its quality of service is reached", LIMITS),
    "AssocGrp": ("all jobs of its account together use as much as they may; the budget may be spent", LIMITS),
    "AssocMax": ("it asks for more than its account gives to one job or user", LIMITS),
    "Assoc": ("a limit of its account is reached", LIMITS),
    "ReqNodeNotAvail": REASONS["ReqNodeNotAvail"],  # Slurm adds names: "ReqNodeNotAvail, UnavailableNodes:n[1-2]"
    "Nodes required for job are DOWN": REASONS["ReqNodeNotAvail"],
    "Partition": ("its partition does not allow what it asks for", "`scontrol show partition` shows the limits"),
}
"""The same for reasons that come in many kinds, by how they begin; the first that fits counts."""


def explained(reason: str) -> str:
    """A sentence on why a job waits and what to do; Slurm's own word is in it."""
    known = REASONS.get(reason) or next((text for head, text in FAMILIES.items() if reason.startswith(head)), None)
    if known is None:
        return f"{reason}: `man squeue` may know more, under JOB REASON CODES"
    return f"{reason}: {known[0]}; {known[1]}"
