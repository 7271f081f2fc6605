"""Writes spec.schema.json, the form of files of specs, from the code: python docs/spec_schema.py"""

from __future__ import annotations

import json
from pathlib import Path

from nvdd.specs.schema import spec_schema

FILE = Path(__file__).with_name("spec.schema.json")


def text() -> str:
    """The file's content of now."""
    return json.dumps(spec_schema(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
