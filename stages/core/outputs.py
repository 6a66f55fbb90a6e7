"""How stages write what people read: metrics as JSON, curves as CSV."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

DIGITS = "%.6g"


def write_metrics(path: Path, metrics: Mapping[str, Any]) -> None:
    """Write a metrics file; numbers that are not finite become null, numpy's become plain ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plain(metrics), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def write_csv(path: Path, table: pd.DataFrame) -> None:
    """Write a table as CSV without an index, floats to six digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(path, index=False, float_format=DIGITS, lineterminator="\n")


def plain(value: Any) -> Any:
    """A value as JSON has it: mappings of text, numbers, booleans and null."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
