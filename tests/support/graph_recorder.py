"""A stand-in for CUDA graphs on a CPU: records the operations of a run and does them again over the same memory.

Like a graph it knows nothing but what was launched: what a run decided on the host stays as it was when it was
recorded. What a graph cannot hold, a value read by the host or a tensor made from one, is refused.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_HOST = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.item.default,
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.nonzero.default,
}


class _Launches:
    """In place of a Triton kernel: records its launches."""

    def __init__(self, kernel: Any, recorder: "Recorder") -> None:
        self.kernel, self.recorder = kernel, recorder

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **keywords: Any) -> None:
            def again() -> None:
                with _disable_current_modes():
                    self.kernel[grid](*args, **keywords)

            again()
            if self.recorder.recording:
                self.recorder.calls.append(again)

        return launch


class Recorder(TorchDispatchMode):
    """Records while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []
        self.recording = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do one operation and remember it with its inputs and outputs."""
        if func in _HOST:
            raise RuntimeError(f"{func} is not permitted when stream is capturing")
        keywords = kwargs or {}
        out = func(*args, **keywords)

        def again() -> None:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **keywords)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self.calls.append(again)
        return out

    def replay(self) -> None:
        """Everything that was recorded, in order."""
        with torch.inference_mode():
            for call in self.calls:
                call()


def record(module: Any, names: tuple[str, ...], run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Record a run that launches the Triton kernels `names` of `module`: what replays it, and its output."""
    recorder = Recorder()
    kernels = {name: getattr(module, name) for name in names}
    for name, kernel in kernels.items():
        setattr(module, name, _Launches(kernel, recorder))
    try:
        recorder.recording = True
        with recorder:
            output = run()
    finally:
        recorder.recording = False
        for name, kernel in kernels.items():
            setattr(module, name, kernel)
    return recorder.replay, output
