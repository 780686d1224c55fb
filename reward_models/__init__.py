"""Reward services: a scorer of gerl, or a custom one, over HTTP."""
