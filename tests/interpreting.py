"""What Triton's interpreter needs to run the packages' kernels on a CPU. `TRITON_INTERPRET=1` switches it on."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest


class LoopNumber(int):
    """Kernels convert their loop variable, which is a Python integer in the interpreter."""

    def to(self, *args: Any, **kwargs: Any) -> LoopNumber:
        return self


def loop(*bounds: Any) -> Iterator[LoopNumber]:
    return (LoopNumber(number) for number in builtins.range(*map(int, bounds)))


@contextlib.contextmanager
def interpreted(*modules: str) -> Iterator[None]:
    """Import these modules and run their packages' kernels untuned, since timing wants a driver, with our `range`."""
    from triton.runtime.autotuner import Autotuner

    tuned = Autotuner.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.configs = self.configs[:1]
        return tuned(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Autotuner, "run", run)
        for name in modules:
            importlib.import_module(name)
        packages = {name.split(".")[0] for name in modules}
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] in packages:
                monkeypatch.setattr(module, "range", loop, raising=False)
        yield
