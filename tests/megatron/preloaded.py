"""What every rank of the tests needs, imported once by the process that they are forks of."""

from areal_hpc.training.megatron.compat import bootstrap

bootstrap()
