"""The rollout ring: slots that bound staleness, and logs that lose nothing.

Read ``ledger.py`` first: the rules, without files. Then ``memory.py``, the ring in one process. On disk, bottom up:
``records`` (bytes), ``chain`` and ``scan`` (one log, written and read), ``epochs`` (who owns the run), ``control``
(what the trainer says), ``writer`` and ``reader`` (the two ends).
"""
