"""Raises when it is imported: the file it reads is not there."""

from pathlib import Path

api = 1
SETTINGS = Path(__file__).with_name("settings.toml").read_text(encoding="utf-8")
