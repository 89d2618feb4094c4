"""Files of data sets at the Hugging Face Hub, fetched by ``huggingface_hub``: proxies, tokens, resumed downloads.

The address of the hub is ``$HF_ENDPOINT``, as the library itself has it.
"""

import os
from pathlib import Path

from benchctl.errors import DatasetError, MissingPackageError


def hub_file(repository: str, filename: str, revision: str, directory: Path | None = None) -> Path:
    """A file of a data set, in ``directory`` or the library's cache.

    Raises DatasetError where it cannot be had, and MissingPackageError.
    """
    try:
        from huggingface_hub import hf_hub_download  # noqa: PLC0415 - an optional package, and slow to import
        from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415
    except ImportError as error:
        raise package_missing("huggingface_hub", repository) from error
    try:
        path = hf_hub_download(
            repository,
            filename,
            repo_type="dataset",
            revision=revision,
            local_dir=directory,
            endpoint=os.environ.get("HF_ENDPOINT"),
        )
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise hub_error(repository, revision, error) from error
    return Path(path)


def hub_filenames(repository: str, revision: str) -> tuple[str, ...]:
    """Names of all files of a data set. Raises DatasetError where they cannot be had."""
    try:
        from huggingface_hub import HfApi  # noqa: PLC0415 - an optional package, and slow to import
        from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415
    except ImportError as error:
        raise package_missing("huggingface_hub", repository) from error
    try:
        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        return tuple(sorted(api.list_repo_files(repository, repo_type="dataset", revision=revision)))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise hub_error(repository, revision, error) from error


def package_missing(package: str, repository: str) -> MissingPackageError:
    """The error for an optional package that reading a data set of the hub needs."""
    return MissingPackageError((package,), f"data set {repository} of the Hugging Face Hub cannot be read")


def hub_error(repository: str, revision: str, error: Exception) -> DatasetError:
    """The error for a data set that cannot be had."""
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return DatasetError(
        f"data set {repository} at revision {revision} cannot be had from the Hugging Face Hub: {reason}; correct "
        "workload.path and workload.revision, log in with 'hf auth login' where access is restricted, or download "
        "the file elsewhere and read it with dataset custom"
    )
