"""Whether a run lives, who of it waits for whom, and who ends it: by files of its directory and by Slurm."""
