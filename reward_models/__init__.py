"""Reward models: scorers, services that give scores over HTTP, and votes of people."""
