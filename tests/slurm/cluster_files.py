"""What Slurm and its database on a cluster of the tests' own are told, but for nodes and partitions (cluster.py)."""

from __future__ import annotations

SLURM_CONF = """\
ClusterName=testbed
SlurmctldHost=login(10.99.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={dir}/run/munge.sock,cred_expire=5
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool/%n
SlurmctldPidFile={dir}/run/slurmctld.pid
SlurmdPidFile={dir}/run/slurmd.%n.pid
SlurmctldLogFile={dir}/log/slurmctld.log
SlurmdLogFile={dir}/log/slurmd.%n.log
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=10.99.0.1
AccountingStoragePass={dir}/run/munge.sock
AccountingStorageTRES=gres/gpu
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
MpiDefault=none
SwitchType=switch/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=64
GresTypes=gpu
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
EnforcePartLimits=ALL
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,bf_hetjob_immediate,bf_continue,sched_interval=2,sched_min_interval=0,\
batch_sched_delay=0
PriorityType=priority/basic
SlurmdTimeout=10
SlurmctldTimeout=10
MessageTimeout=5
BatchStartTimeout=10
KillWait=5
UnkillableStepTimeout=120
MinJobAge=3600
"""
"""Nodes that claim more than the host has, quick scheduling, failures seen within seconds. cred_expire is also how long
a requeued job waits before it may start again (default 120 s)."""

SLURMDBD_CONF = """\
DbdHost=login
DbdAddr=10.99.0.1
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={dir}/run/munge.sock
LogFile={dir}/log/slurmdbd.log
PidFile={dir}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
CommitDelay=1
"""

MARIADB = ("mariadbd", "--no-defaults", "--user=root", "--innodb-buffer-pool-size=64M", "--innodb-log-file-size=16M")
MARIADB_USER = """\
CREATE DATABASE slurm_acct_db;
CREATE USER slurm@localhost IDENTIFIED BY 'slurm';
GRANT ALL ON slurm_acct_db.* TO slurm@localhost;
"""
