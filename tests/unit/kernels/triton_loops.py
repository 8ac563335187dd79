"""Triton's interpreter, made to run loops whose bounds are arguments, which it cannot with NumPy 2.4."""

from triton.runtime import interpreter


def allow_loops():
    """Call before the first kernel."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
