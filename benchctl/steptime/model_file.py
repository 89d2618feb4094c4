"""The file of a step-time model: readable JSON with its format, version and provenance."""

import json
from pathlib import Path
from typing import Any, Final

import msgspec

from benchctl.errors import UsageError
from benchctl.steptime.model import StepTimeModel
from benchctl.untrusted.reading import DECODING_ERRORS, UnreadableError, decoding_problem, read_json
from benchctl.untrusted.text import visible_value

FORMAT: Final = "benchctl-step-time-model"
VERSION: Final = 1
_MOST: Final = 1e100
_DAMAGE: Final[tuple[type[Exception], ...]] = (*DECODING_ERRORS, UsageError)
_ROWS: Final = "draws"
"""The one long table of the file: a line for each of its rows."""


def write_model(path: Path, model: StepTimeModel) -> None:
    """Write the file whole; the same model gives the same bytes."""
    path.write_text(model_text(model), encoding="utf-8")


def model_text(model: StepTimeModel) -> str:
    """The JSON of a model, with each bootstrap draw on one line."""
    document = {"format": FORMAT, "version": VERSION, **msgspec.to_builtins(model)}
    rows = [json.dumps(row) for row in document.pop(_ROWS)]
    head = json.dumps(document, indent=1).removesuffix("\n}")
    body = "[" + ",".join(f"\n  {row}" for row in rows) + ("\n ]" if rows else "]")
    return f'{head},\n "{_ROWS}": {body}\n}}\n'


def read_model(path: Path) -> StepTimeModel:
    """The model of a file. Raises UsageError for a file that is not one, is newer or is damaged."""
    try:
        document = read_json(path)
    except UnreadableError as error:
        raise UsageError(f"{error}; 'benchctl steptime fit -o FILE' writes a step-time model") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UsageError(f"{path}: not a step-time model; name a file of 'benchctl steptime fit -o'")
    version = document.get("version")
    if version != VERSION:
        raise UsageError(
            f"{path}: version {visible_value(version)} of the format is unknown to this benchctl, which reads "
            f"{VERSION}; fit the model again, or use the benchctl that wrote it"
        )
    return _model(path, document)


def _model(path: Path, document: dict[str, Any]) -> StepTimeModel:
    fields = {key: value for key, value in document.items() if key not in {"format", "version"}}
    unknown_keys = sorted(set(fields) - set(StepTimeModel.__dataclass_fields__))
    if unknown_keys:
        raise UsageError(
            f"{path}: key {visible_value(unknown_keys[0])} is unknown; remove it, or fit the model again"
        )
    try:
        model = msgspec.convert(fields, StepTimeModel)
    except _DAMAGE as error:
        raise UsageError(f"{path}: damaged ({decoding_problem(error)}); fit the model again") from error
    _check_numbers(path, fields)
    width = len(model.coefficients)
    if any(len(draw) != width for draw in model.draws):
        raise UsageError(f"{path}: a row of draws has not {width} values, one for each coefficient; fit it again")
    return model


def _check_numbers(path: Path, fields: object) -> None:
    """Raise UsageError for a number without a value, or one so large that sums of it have none."""
    if isinstance(fields, dict | list):
        for part in fields.values() if isinstance(fields, dict) else fields:
            _check_numbers(path, part)
    elif isinstance(fields, float) and not abs(fields) <= _MOST:
        raise UsageError(f"{path}: damaged (a number is {fields}); fit the model again")
