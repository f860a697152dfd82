"""vLLM behind the same HTTP surface: a server of our own around its engine, and its life as a subprocess.

    this process                   the environment that vLLM is installed in
    ------------                   --------------------------------------------------------------
    process.serving  -- starts ->  server: HTTP, one route for each that the client knows
                                     engine: requests to vLLM's AsyncLLM, its outputs to answers
                                     updates: weight updates, whole or not at all
                                       worker: in each of vLLM's workers, takes the tensors

vLLM's own server has neither one API for tokens in and out and weights, nor groups of gloo or HCCL, and it opens its
remote calls to all who reach it. Here only what a run needs can be asked for, by who has the key.
"""
