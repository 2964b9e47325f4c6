"""`sherlorch report`: a report that was saved as JSON, read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sherlorch.errors import SherlorchError
from sherlorch.reports import html
from sherlorch.reports.json import SCHEMA

_NEEDED = {"ok": bool, "text": str, "culprits": list, "coverage": dict}


def load(name: str) -> dict[str, Any]:
    """The data that `report.to_json()` wrote; SherlorchError for anything else."""
    try:
        text = Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise SherlorchError(f"cannot read `{name}`: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SherlorchError(f"`{name}` is not JSON: it is no UTF-8 text") from error
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SherlorchError(f"`{name}` is not JSON: {error}") from error
    if not isinstance(data, dict) or "schema" not in data:
        raise SherlorchError(
            f"`{name}` is JSON, but no report of sherlorch: write one with `report.to_json()`"
        )
    if data["schema"] != SCHEMA:
        raise SherlorchError(
            f"`{name}` is a report of schema {data['schema']!r}, this sherlorch reads {SCHEMA}: "
            "use the one that wrote it"
        )
    for key, kind in _NEEDED.items():
        if not isinstance(data.get(key), kind):
            raise SherlorchError(f"`{name}` is a damaged report: `{key}` should be a {kind.__name__}")
    return data


def page(name: str, data: dict[str, Any]) -> str:
    """The page of what `load` gave; it knows the operations of the paths only."""
    try:
        return html.page(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SherlorchError(f"`{name}` is a damaged report, no page can be made of it: {error!r}") from error
