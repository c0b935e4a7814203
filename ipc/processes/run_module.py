"""`python -P .../run_module.py MODULE ARGUMENTS`: runs a module of the Quire in which this file lies.

`python -m` would run the first `quire` on Python's path, which is another one when a
program uses a Quire that lies beside it. Imports nothing of Quire's itself.
"""

import importlib.util
import runpy
import sys

_PACKAGE_DIR = __file__.rpartition("/ipc/")[0]


def main() -> None:
    """Import the package from its folder, then run the module that is named as `__main__`."""
    spec = importlib.util.spec_from_file_location("quire", f"{_PACKAGE_DIR}/__init__.py")
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["quire"] = package
    spec.loader.exec_module(package)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
