"""Episodes, rewards and filters: prompts become trajectory groups."""
