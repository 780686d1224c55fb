"""Reward models as scorers: networks, OCR, judges over HTTP, and people."""
