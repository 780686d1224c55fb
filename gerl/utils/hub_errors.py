"""Exceptions of huggingface_hub for an unreachable Hub, by its version."""

from importlib import import_module

from gerl.utils.versions import has

UNREACHED: tuple[type[Exception], type[Exception]]
if has("huggingface_hub", "1.0"):
    try:
        from huggingface_hub.utils import httpx
    except ImportError:  # before 2.0
        httpx = import_module("httpx")
    UNREACHED = (httpx.TransportError, httpx.TimeoutException)
else:
    import requests

    UNREACHED = (requests.ConnectionError, requests.Timeout)
