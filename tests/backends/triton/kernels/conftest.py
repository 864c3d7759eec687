"""The kernels run in Triton's interpreter here, on CPU tensors."""

import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
# transformers and torch._dynamo import triton where they can. What they have is left to them; the kernels get one that
# interprets. Its native part can be loaded only once.
for name in [name for name in sys.modules if name == "triton" or name.startswith("triton.")]:
    if not name.startswith("triton._C"):
        del sys.modules[name]


def _patch_language_faster() -> None:
    """Let the interpreter look up triton.language's builtins once, not at every call of a device function.

    That look-up is more than half of its time on these small grids.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch_attribute: Callable[..., None] = interpreter._patch_attr

    @cache
    def builtins(package: Any) -> tuple[str, ...]:
        return tuple(name for name in dir(package) if tl.core.is_builtin(getattr(package, name, None)))

    def patch_builtin(package: Any, *rest: Any) -> None:
        for name in builtins(package):
            member = getattr(package, name)
            if tl.core.is_builtin(member):
                patch_attribute(package, name, member, *rest)

    interpreter._patch_builtin = patch_builtin


_patch_language_faster()
