"""The real SGLang server behind the same HTTP surface: its life as a subprocess, and a platform plugin for CPUs."""
