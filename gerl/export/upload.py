"""Upload a folder as a model repository of the Hugging Face Hub."""

import re
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, constants
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from gerl.errors import ConfigError, GerlError
from gerl.utils.files import reason
from gerl.utils.hub_errors import UNREACHED

PATIENCE = 10.0  # timeout of the Hub in seconds
OWN = {".gitattributes"}  # files that the Hub creates in an empty repository


def check_name(repository: str) -> None:
    """Raise `ConfigError` unless `repository` has the form `owner/name`."""
    try:
        validate_repo_id(repository)
        named = re.fullmatch(r"[\w.-]+/[\w.-]+", repository) is not None
    except HFValidationError:
        named = False
    if not named:
        raise ConfigError(
            f"push={repository}: expected owner/name, the name of a user or organisation and that of the model"
        )


def check_upload(repository: str, private: bool, overwrite: bool) -> None:
    """Check with the Hub that an upload is possible and replaces nothing unintended.

    Raises `ConfigError` if there is no network or login, or the repository has files without `overwrite`, or is public
    despite `private`.
    """
    api = HfApi()
    try:
        api.whoami()
        info = api.model_info(repository, timeout=PATIENCE)
    except RepositoryNotFoundError:
        return
    except (LocalTokenNotFoundError, HfHubHTTPError, OfflineModeIsEnabled, *UNREACHED) as error:
        raise ConfigError(_explain(repository, error)) from error
    files = sorted({entry.rfilename for entry in info.siblings or []} - OWN)
    if files and not overwrite:
        raise ConfigError(
            f"push={repository}: it already exists and has {len(files)} files, such as {files[0]}; choose another "
            "name, or add overwrite=true, which replaces those with the same name"
        )
    if private and info.private is False:
        raise ConfigError(
            f"private=true: {repository} already exists and is public; choose another name, or make it private there"
        )


def upload(folder: Path, repository: str, private: bool, message: str) -> str:
    """Create the repository if missing, upload the folder in one commit, and return the repository's URL.

    Raises `GerlError` if the Hub refuses or cannot be reached.
    """
    api = HfApi()
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    operations = [CommitOperationAdd(path.relative_to(folder).as_posix(), path) for path in files]
    try:
        made = api.create_repo(repository, private=private or None, exist_ok=True)
        api.create_commit(repository, operations, commit_message=message)
    except (HfHubHTTPError, OfflineModeIsEnabled, *UNREACHED, OSError, ValueError) as error:
        raise GerlError(_explain(repository, error)) from error
    return str(made)


def _explain(repository: str, error: Exception) -> str:
    hub, setting = constants.ENDPOINT, f"push={repository}"
    if isinstance(error, LocalTokenNotFoundError):
        return f"{setting}: not logged in at {hub}: run 'hf auth login', or remove push and give out=FOLDER"
    if isinstance(error, OfflineModeIsEnabled):
        return f"{setting}: HF_HUB_OFFLINE is set: unset it, or remove push and give out=FOLDER"
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if status == 401:
        return f"{setting}: {hub} rejects the token of this machine: run 'hf auth login' again"
    if status == 403:
        return f"{setting}: {hub} denies write access there: correct the owner, or log in with a token that has it"
    if isinstance(error, UNREACHED):
        return (
            f"{setting}: {hub} cannot be reached ({reason(error):.200}): connect this machine to it, or remove push "
            "and give out=FOLDER, which 'hf upload' can upload later"
        )
    return f"{setting}: {hub} rejects the upload ({reason(error):.300}): correct the problem, or try again"
