"""YAML from files that people write. Importing this imports PyYAML (`pip install 'breccia-core[yaml]'`)."""

from __future__ import annotations

from typing import Any

import yaml

from .errors import OptionError


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping, of which YAML's own loader takes the last in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: list[Any] = [self.construct_object(key, deep=True) for key, _ in node.value]
        for n, key in enumerate(keys):
            if key in keys[:n]:
                first, second = (node.value[i][0].start_mark.line + 1 for i in (keys.index(key), n))
                raise OptionError(f"{self.name}: {key!r} stands in lines {first} and {second}; delete one of them.", key=key)
        return super().construct_mapping(node, deep)


def parsed_yaml(text: str, name: str) -> Any:
    """The value of one YAML document, made of Python's own types.

    name: what errors call the file. Raises OptionError for text that is no YAML, and for a key that stands twice.
    """
    loader = _Loader(text)
    loader.name = name
    try:
        return loader.get_single_data()
    except yaml.YAMLError as e:
        raise OptionError(f"{name} is no YAML: {e}", path=name) from e
    finally:
        loader.dispose()
