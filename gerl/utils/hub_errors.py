"""Errors of the Hugging Face Hub in a sentence, and the exceptions for one that is not reached, by version."""

import errno
from importlib import import_module

from huggingface_hub import constants, model_info
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from gerl.errors import causes
from gerl.utils.files import reason
from gerl.utils.versions import has

PATIENCE = 10.0  # seconds to wait for the Hub's first response

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


def request_error(path: str) -> Exception | None:
    """Return the error of a single request for `path`, if any: a download would retry for a long time."""
    try:
        model_info(path, timeout=PATIENCE)
    except (HfHubHTTPError, OfflineModeIsEnabled, *UNREACHED) as error:
        return error
    return None


def missing(path: str, error: Exception, unreached: Exception | None, key: str) -> str:
    """Return cause and remedy if the model `path`, the value of `key`, is neither in the cache nor on the Hub."""
    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    setting = f"{key}={path!r}"
    first = unreached or error
    chain = list(causes(first))
    if any(getattr(cause, "errno", None) == errno.ENOSPC or "No space left" in str(cause) for cause in chain):
        return (
            f"{setting} does not fit on the disk of the Hub cache {cache}: free up space, or set HF_HOME to a folder "
            "on a larger disk"
        )
    if any(isinstance(cause, GatedRepoError) for cause in chain):
        return f"{setting} is gated: accept its terms at {hub}/{path}, then log in with 'hf auth login'"
    if any(isinstance(cause, RepositoryNotFoundError) for cause in chain):
        return f"{setting}: {hub} has no such model, or a private one: correct the id, or log in with 'hf auth login'"
    status = next((cause.response.status_code for cause in chain if isinstance(cause, HfHubHTTPError)), None)
    if status in (401, 403):
        return (
            f"{setting}: {hub} denies access ({status}): log in with 'hf auth login', and accept the terms at "
            f"{hub}/{path} if there are any"
        )
    absent = f"{setting} is missing or incomplete in the Hub cache {cache}"
    if isinstance(unreached, OfflineModeIsEnabled):
        return f"{absent}, and HF_HUB_OFFLINE is set: unset it, or set {key} to a folder with it"
    if unreached is not None:
        return (
            f"{absent}, and {hub} cannot be reached ({in_words(unreached)}): connect this machine to it, or download "
            f"it on another with 'hf download {path} --local-dir FOLDER' and set {key}=FOLDER here"
        )
    if any(isinstance(cause, EntryNotFoundError) for cause in chain):
        return (
            f"{setting} cannot be loaded as a diffusers pipeline: it has no model_index.json at {hub}; use a model "
            "in diffusers format"
        )
    if any(isinstance(cause, (*UNREACHED, HfHubHTTPError)) for cause in chain):
        return (
            f"{setting}: the download from {hub} was interrupted ({in_words(error)}): start again, completed files are "
            "kept"
        )
    return f"{setting} cannot be loaded as a diffusers pipeline: {in_words(error)}"


def in_words(error: Exception) -> str:
    return next((line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()), reason(error))
