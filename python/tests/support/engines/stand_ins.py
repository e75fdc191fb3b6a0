"""Stand-ins for what an engine's modules import and these tests never call.

An engine's modules import most of the engine, and dozens of packages with it: servers, tokenizers, kernels. The tests
drive a few modules. Three kinds of stand-ins let those few be the engine's own files:

- a shell: a package of the engine without its `__init__`; its submodules are the real ones;
- a blank module: each attribute is a class that does nothing;
- a finder that gives blank modules for named packages that are not installed. One that is installed is the real one.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
import types
from typing import Iterable

#: Version of what is not there: newer than whatever an engine asks for.
NEWEST = "99.0.0"


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


class _BlankType(type):
    """Type of a class that bears what modules do with classes while they are imported."""

    def __getattr__(cls, name):
        if _is_special(name):
            raise AttributeError(name)
        return blank(name)

    def __call__(cls, *args, **named):
        if len(args) == 1 and not named and callable(args[0]) and not isinstance(args[0], _BlankType):
            return args[0]  # A decorator without arguments.
        try:
            return type.__call__(cls)
        except TypeError:
            return cls

    def __getitem__(cls, _key):
        return cls

    def __setitem__(cls, _key, _value):
        pass

    def __or__(cls, _other):
        return cls

    __ror__ = __or__

    def __iter__(cls):
        return iter(())

    def __contains__(cls, _item):
        return False

    def __instancecheck__(cls, _object):
        return False


class Blank(metaclass=_BlankType):
    """Base of every class of a blank module."""

    def __init__(self, *_args, **_named):
        pass

    def __init_subclass__(cls, **_named):
        pass

    def __call__(self, *args, **named):
        return args[0] if len(args) == 1 and not named and callable(args[0]) else self

    def __getattr__(self, name):
        if _is_special(name):
            raise AttributeError(name)
        return blank(name)

    def __iter__(self):
        return iter(())

    def __getitem__(self, _key):
        return self

    def __setitem__(self, _key, _value):
        pass


def blank(name: str) -> type:
    """A class that does nothing."""
    return _BlankType(name, (Blank,), {})


class BlankModule(types.ModuleType):
    """A module whose every attribute is a class that does nothing."""

    def __getattr__(self, name):
        if name == "__version__":
            return NEWEST
        if name == "__all__":
            return []
        if _is_special(name):
            raise AttributeError(name)
        value = blank(name)
        setattr(self, name, value)
        return value


class _Shell(BlankModule):
    """A package without its `__init__`: submodules are the real ones, any other attribute is blank."""

    def __getattr__(self, name):
        if not name.startswith("__"):
            path = os.path.join(self.__path__[0], name)
            if os.path.isdir(path) or os.path.exists(path + ".py"):
                return importlib.import_module(f"{self.__name__}.{name}")
        return super().__getattr__(name)


def add_shells(root: str, names: Iterable[str]) -> None:
    """Makes shells of the packages `names` in the folder `root`; those that this version lacks are left out."""
    for name in names:
        path = os.path.join(root, *name.split("."))
        if not os.path.isdir(path):
            continue
        shell = _Shell(name)
        shell.__path__ = [path]
        shell.__version__ = "0"
        shell.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        _enter(shell)


def add_blank(name: str, **attributes) -> BlankModule:
    """Puts a blank module in place of an engine's own; `attributes` are what is needed of it."""
    module = BlankModule(name)
    module.__dict__.update(attributes)
    sys.modules[name] = module
    return module


def _enter(module: types.ModuleType) -> None:
    sys.modules[module.__name__] = module
    parent, _, child = module.__name__.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, module)


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives blank modules for packages that no other finder has."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in self._names:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = BlankModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


def add_absent(names: Iterable[str]) -> None:
    """Lets the packages `names` be imported where they are not installed, and be asked for their version."""
    names, installed = frozenset(names), importlib.metadata.version

    def version(name):
        try:
            return installed(name)
        except importlib.metadata.PackageNotFoundError:
            if name not in names:
                raise
            return NEWEST

    importlib.metadata.version = version
    sys.meta_path.append(_Absent(names))


def prepare_torch() -> None:
    """Imports the part of torch that looks for triton, before triton may have a stand-in."""
    # torch's compiler asks this one for its defaults, and a blank answer is none.
    sys.modules.setdefault("triton._torchtlx_default", None)
    import torch._dynamo  # noqa: F401
