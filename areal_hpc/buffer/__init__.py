"""The rollout ring: slots and segment logs."""
