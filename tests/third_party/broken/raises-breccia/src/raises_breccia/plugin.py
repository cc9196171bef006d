"""Raises on import: the file it reads does not exist."""

from pathlib import Path

api = 1
SETTINGS = Path(__file__).with_name("settings.toml").read_text(encoding="utf-8")
