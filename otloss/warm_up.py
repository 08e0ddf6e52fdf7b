"""`python -m otloss.warm_up [NAME ...]`: compile the CPU kernels before they are needed, as `otloss.warm_up()` does."""

from __future__ import annotations

import argparse
import logging
import sys
from importlib import import_module
from types import ModuleType

from otloss._warm_up import DTYPES, EXAMPLES, warm_up


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m otloss.warm_up",
        description="Compile the CPU kernels and keep them on disk, in NUMBA_CACHE_DIR if that is set, and otherwise "
        "beside the package or in the user's cache folder. One process for each thread of torch (OMP_NUM_THREADS).",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(EXAMPLES)} (default: all)")
    parser.add_argument("--dtypes", nargs="+", choices=sorted(DTYPES), default=list(DTYPES), help="default: both")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(EXAMPLES))
    if unknown:
        parser.error(f"no kernels are known for {', '.join(unknown)}; expected some of {', '.join(EXAMPLES)}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    warm_up(*options.names, dtypes=[DTYPES[name] for name in options.dtypes])


class _Function(ModuleType):
    """This module is called as the function, since any import of it sets the attribute `otloss.warm_up`."""

    __call__ = staticmethod(warm_up)

    def __reduce__(self) -> tuple[object, ...]:
        return import_module, (__name__,)


sys.modules[__name__].__class__ = _Function
if __name__ == "__main__":
    main()
