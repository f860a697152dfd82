# A conda environment, for the scripts beside this directory and for cluster.setup; to be sourced by bash.
#   AREAL_HPC_CONDA=/scratch/miniforge AREAL_HPC_CONDA_ENV=areal AREAL_HPC_ENV=sbatch/env/conda.sh sbatch ...
source "${AREAL_HPC_CONDA:?is to be the directory of the conda installation}/etc/profile.d/conda.sh" &&
  conda activate "${AREAL_HPC_CONDA_ENV:?is to be the name or directory of the environment}"
