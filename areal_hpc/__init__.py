"""Fully asynchronous reinforcement learning of language models on supercomputers."""

__version__ = "0.1.0"
