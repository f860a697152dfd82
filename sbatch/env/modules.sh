# Environment modules or Lmod, for the scripts beside this directory and for cluster.setup; to be sourced by bash.
#   AREAL_HPC_MODULES="cuda/12.4 python/3.11" AREAL_HPC_ENV=sbatch/env/modules.sh sbatch sbatch/train.sbatch CONFIG
for start in "${MODULESHOME:-}/init/bash" "${LMOD_PKG:-}/init/bash" /etc/profile.d/lmod.sh /etc/profile.d/modules.sh; do
  type module > /dev/null 2>&1 && break  # a batch script's shell may not have read what a login's has
  if [ -r "$start" ]; then source "$start"; fi
done
# shellcheck disable=SC2086  # several words are meant
module load ${AREAL_HPC_MODULES:?is to name the modules to load}
