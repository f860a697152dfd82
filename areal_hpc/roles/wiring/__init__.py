"""Which implementation is used where: the only room that knows all the wings.

Each function turns the configuration and a process's place in the run into ready objects behind the protocols.
"""
