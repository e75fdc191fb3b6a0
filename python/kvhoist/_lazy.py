"""Names of a package that are imported when they are first used, because their modules need an engine."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Callable, Mapping


def lazy(package: str, module_of: Mapping[str, str]) -> Callable[[str], Any]:
    """`__getattr__` of a package: each of these names is that of a module of it, by the module's name."""

    def get(name: str) -> Any:
        module = module_of.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{module}"), name)

    return get
