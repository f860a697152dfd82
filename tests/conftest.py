"""Before anything imports torch: one thread a process, since threads that spin for each other starve a busy machine."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
