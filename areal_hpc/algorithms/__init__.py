"""Pure functions from rewards to losses: arrays in, arrays and statistics out.

rewards -> advantages.py (numpy, one number a trajectory)
hidden states -> logprobs.py (chunked log-softmax) -> losses.py (clipped objective), which asks
masking.py (how far the behaviour policy is from the proximal one) and reports through stats.py
table.py names the algorithms; checks.py refuses settings that cannot work, and needs no torch
"""
