"""Run as a script: checks of the parts that are named, each with options, with TRITON_INTERPRET=1."""

import importlib
import sys

from triton.runtime import interpreter


def allow_loops():
    """Let loops have bounds that are arguments, which the interpreter cannot with NumPy 2.4."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


if __name__ == "__main__":
    allow_loops()
    for argument in sys.argv[1:]:
        part, *options = argument.split()
        importlib.import_module(f"interpreted_{part}").check(*options)
