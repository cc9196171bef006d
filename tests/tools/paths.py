"""Where the parts of the repository are."""

from pathlib import Path

#: The repository.
ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
GOLDEN = TESTS / "golden"
