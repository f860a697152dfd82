"""Batches to new weights."""
