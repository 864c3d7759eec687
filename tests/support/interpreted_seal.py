"""The Triton seal kernel in Triton's interpreter, as a process of its own: `python interpreted_seal.py IN OUT`.

IN and OUT are .npz files. IN holds `<i>.keys` and `<i>.values`, `[T, G, D]`, and `formats`, lines of JSON with the
preset's name and head_dim; OUT gets `<i>.tiles`, `<i>.flags` and `<i>.status`.
"""

import importlib.util
import json
import sys
import warnings
from pathlib import Path

import numpy as np

# What puts the interpreter in place stands with the tests of the Triton kernels.
INTERPRETER = Path(__file__).resolve().parents[1] / "backends" / "triton" / "kernels" / "conftest.py"
LARGE_SLICES = {64: 64, 128: 64, 256: 64, 512: 32}  # larger than on a device, for the sake of time


def main(source: str, target: str) -> None:
    spec = importlib.util.spec_from_file_location("interpreter", INTERPRETER)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))

    import torch

    from kvarn.backends.triton.kernels import seal as kernel
    from kvarn.format import Preset

    torch.set_num_threads(1)
    kernel.SLICE_TOKENS = LARGE_SLICES
    warnings.simplefilter("ignore")  # the interpreter is NumPy, which warns of infinities and NaN
    given, made = np.load(source), {}
    for i, line in enumerate(given["formats"]):
        preset, head_dim = json.loads(str(line))
        fmt = Preset.parse(preset).with_head_dim(head_dim)
        keys, values = (torch.from_numpy(given[f"{i}.{name}"]) for name in ("keys", "values"))
        for name, x in zip(("tiles", "flags", "status"), kernel.seal(keys, values, fmt), strict=True):
            made[f"{i}.{name}"] = x.numpy()
    np.savez(target, **made)


if __name__ == "__main__":
    main(*sys.argv[1:])
