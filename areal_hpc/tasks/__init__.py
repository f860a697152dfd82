"""Procedural tasks and the tiny model that learns them on a laptop."""
