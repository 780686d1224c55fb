"""A live page of runs: it reads the files in their folders, and asks by files there; no run opens a port for it."""
