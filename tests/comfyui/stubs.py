"""Torchvision and torchaudio in name alone: ComfyUI imports them at its start, our nodes never do, and the real ones
are gigabytes. Servers of the tests import this file as their `sitecustomize`.
"""

import importlib.abc
import importlib.machinery
import sys
import types


def anything(self, name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (Anything,), {})


class Meta(type):
    __getattr__ = anything


class Anything(metaclass=Meta):
    __getattr__ = anything

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return self


class Stub(types.ModuleType):
    __path__ = []
    __getattr__ = anything


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("torchvision", "torchaudio"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module):
        module.__version__ = "0"


sys.meta_path.append(Finder())
