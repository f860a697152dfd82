"""Engines that turn tokens into tokens, and the client that speaks to all of them."""
