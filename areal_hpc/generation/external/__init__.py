"""What engines with a process of their own have in common: how one is described, started, watched and ended."""
