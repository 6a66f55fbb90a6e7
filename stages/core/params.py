"""Parameters in, one-line errors out: what every stage does at its edge.

``read`` turns one section of params.yaml into the type that its owner declares, a subclass of `Section`. `run` is the
entry point of a stage: an `InputError` ends it with one line on standard error and exit code 1.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args, get_origin

import typer
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator
from pydantic.fields import FieldInfo
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

PARAMS = Path("params.yaml")


class InputError(ValueError):
    """Something the user gave is wrong; the message is the one line that they see."""


class Section(BaseModel):
    """One section of params.yaml. Unknown keys, booleans, lists, text and numbers out of range are refused.

    A number that YAML reads as text (``1e-3`` in YAML 1.1) counts as the number that it spells.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_only_where_numbers_belong(cls, value: Any, info: Any) -> Any:
        if cls.model_fields[info.field_name].annotation not in (int, float):
            return value
        if isinstance(value, bool):
            raise ValueError("a boolean is no number")
        if isinstance(value, str):
            for number in (int, float):  # whole numbers first: as a float, a long seed would lose its last digits
                with suppress(ValueError):
                    return number(value)
        return value

    @classmethod
    def parse(cls, values: Any, where: str) -> Self:
        """Check `values` (a mapping) and say in one sentence what is wrong with it.

        Args:
            values: what stands in the section.
            where: the section's name, put before the key in messages.

        Raises:
            InputError: names the key, its value and what is allowed.
        """
        if not isinstance(values, dict):
            raise InputError(f"{where} = {values!r}: must be a section with the keys {', '.join(cls.model_fields)}")
        for key, value in values.items():
            if key not in cls.model_fields:
                known = ", ".join(cls.model_fields)
                raise InputError(f"{where}.{key} = {value!r}: there is no such key; {where} has {known}")
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise InputError(_sentence(cls, error, where)) from None


S = TypeVar("S", bound=Section)


def _sentence(section: type[Section], error: ValidationError, where: str) -> str:
    """The first of pydantic's complaints as ``section.key = value: what is allowed``."""
    complaint = error.errors()[0]
    if not complaint["loc"]:  # raised by a validator of the whole section, which names keys and values itself
        return f"{where}: {complaint['ctx']['error']}"
    key = str(complaint["loc"][0])
    if complaint["type"] == "missing":
        return f"{where}.{key} is missing: must be {allowed(section.model_fields[key])}"
    return f"{where}.{key} = {complaint['input']!r}: must be {allowed(section.model_fields[key])}"


def allowed(field: FieldInfo) -> str:
    """What a parameter may be, in words: ``a whole number from 2 to 1000``."""
    if get_origin(field.annotation) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(field.annotation))
    kind = {int: "a whole number", float: "a number", str: "text"}.get(field.annotation, str(field.annotation))
    bounds = {name: getattr(m, name) for m in field.metadata for name in ("ge", "gt", "le", "lt") if hasattr(m, name)}
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    if {"ge", "le"} <= bounds.keys():
        return f"{kind} from {bounds['ge']} to {bounds['le']}"
    return f"{kind} {' and '.join(f'{words[name]} {bound}' for name, bound in bounds.items())}".rstrip()


def read(path: Path, name: str, section: type[S]) -> S:
    """Read one section of a parameter file, with the YAML parser that DVC uses.

    Raises:
        InputError: the file is missing or no YAML, the section is missing, or a value in it is not allowed.
    """
    try:
        values = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: run this from the repository's root, or name the file") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (YAMLError, ValueError) as error:  # no text, no YAML, or a number or date that is none
        raise InputError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict) or name not in values:
        raise InputError(f"{path} has no section {name!r}")
    return section.parse(values[name], name)


def run(main: Callable[..., None]) -> None:
    """Run a stage's `main` through Typer; what the user gave wrong becomes one line and exit code 1.

    So does a file or folder that cannot be read or written.
    """
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    try:
        app()
    except (InputError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
