"""Reward services: a scorer of gerl, or one of your own, over HTTP."""
