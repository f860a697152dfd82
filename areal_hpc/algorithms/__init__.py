"""Pure functions from rewards to losses: arrays in, arrays and statistics out.

rewards -> advantages.py (numpy, one number a trajectory) -> returns.py (GAE and the like: one number a token)
hidden states -> logprobs.py (chunked log-softmax) -> losses.py (what a token costs: the menu)
losses.py works in the frame of objective.py, which asks masking.py (how far the behaviour policy is from the proximal
one) and kl.py (how far the policy is from a reference) and reports through stats.py
pass_at_k.py (numpy) says how good the answers of an evaluation are, and how sure that is
table.py finds an algorithm by its name; what the name sets, and what it refuses, is in config/ and needs no torch
"""
