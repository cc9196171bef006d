"""Writes the stubs of the modules that import their names on first use, from the tables of these modules.

python docs/scripts/stubs.py             # writes __init__.pyi, backend.pyi and internal.pyi of core
python docs/scripts/stubs.py --check     # exits with 1 where a stub says anything else
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import breccia
from breccia import backend, internal


def stub(module: ModuleType) -> str:
    """The stub of a module: each name of its table `_HOMES` from its module, and those of `_EARLIER` if any."""
    homes: dict[str, str] = dict.fromkeys(getattr(module, "_MODULES", ()), "") | vars(module)["_HOMES"]
    imports = [f"from .{home} import {name} as {name}" for name, home in sorted(homes.items(), key=_order)]
    earlier = [f"{name} = {present}" for name, present in vars(module).get("_EARLIER", {}).items()]
    deprecated = ["", "#: Deprecated.", *earlier] if earlier else []
    last = "__version__: str" if module is breccia else "__all__: list[str]"
    return "\n".join([*imports, *deprecated, "", last, ""])


def _order(item: tuple[str, str]) -> tuple[str, int, str]:
    """The order of ruff: by module, then constants, classes and functions."""
    name, home = item
    return home, 0 if name.isupper() else 1 if name[0].isupper() else 2, name


def stubs() -> dict[Path, str]:
    """The text of each stub by its path."""
    return {Path(str(module.__file__)).with_suffix(".pyi"): stub(module) for module in (breccia, backend, internal)}


def main(check: bool) -> int:
    wrong = {path: text for path, text in stubs().items() if path.read_text(encoding="utf-8") != text}
    for path, text in wrong.items():
        print(f"{path} differs from the table of its module" if check else f"wrote {path}")
        if not check:
            path.write_text(text, encoding="utf-8")
    return int(check and bool(wrong))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv))
