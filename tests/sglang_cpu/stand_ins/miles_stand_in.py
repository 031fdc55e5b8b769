"""A package in name only, for what is imported and never called on a machine without CUDA.

Every name in it, and every module below it, is there; calling one says what was called.
"""

import importlib.abc
import importlib.machinery
import sys
import types


class Absent:
    """Whatever was asked for."""

    def __init__(self, name):
        self.__name__ = self.__qualname__ = name

    def __call__(self, *_, **__):
        raise NotImplementedError(f"{self.__name__} needs CUDA, and only its name is here")

    def __getattr__(self, name):
        return attribute(self.__name__, name)


def attribute(owner, name):
    """`owner.name`; names with two underscores are Python's own questions."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(f"{owner}.{name}")


class Below(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below one package."""

    def __init__(self, package):
        self.package = package

    def find_spec(self, name, path=None, target=None):
        if not name.startswith(f"{self.package}."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: attribute(spec.name, name)
        return module

    def exec_module(self, module):
        module.__path__ = []


def stand_in(module, version):
    """Make a module such a package."""
    module["__version__"] = version
    module["__path__"] = []
    module["__getattr__"] = lambda name: attribute(module["__name__"], name)
    sys.meta_path.insert(0, Below(module["__name__"]))
