"""Pure functions from rewards to losses."""
