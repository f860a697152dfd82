# A virtual environment, for the scripts beside this directory and for cluster.setup; to be sourced by bash.
#   AREAL_HPC_VENV=/scratch/me/env AREAL_HPC_ENV=sbatch/env/venv.sh sbatch sbatch/train.sbatch CONFIG
source "${AREAL_HPC_VENV:?is to be the directory of the environment}/bin/activate"
