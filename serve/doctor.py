"""`kvarn doctor`: this machine, the versions, and every operation of every backend here against the oracle."""

import importlib
import json
import platform
import sys
from importlib import metadata
from typing import Any

import click

from kvarn import __version__
from kvarn.backend import BACKENDS, available, choose
from kvarn.errors import BackendError
from kvarn.selfcheck import run_checks
from kvarn.serve.loading import apple_silicon

PACKAGES = ("numpy", "torch", "triton", "transformers", "mlx", "mlx-lm", "safetensors", "tokenizers")


def doctor(*, as_json: bool) -> None:
    """Print the report; BackendError at the end when an operation fails or no backend is installed."""
    report: dict[str, Any] = {
        "kvarn": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "backends": {},
    }
    show = (lambda text: None) if as_json else click.echo
    show(f"kvarn {__version__}, Python {report['python']}, {report['system']}")
    show(", ".join(f"{name} {version or 'not installed'}" for name, version in report["packages"].items()))
    failed = 0
    for name, framework in BACKENDS.items():
        if name not in available():
            report["backends"][name] = None
            show(f"{name}: skipped, {framework} is not installed")
            continue
        module = importlib.import_module(f"kvarn.backends.{name}.check")
        report["backends"][name] = {"device": module.describe(), "checks": []}
        show(f"{name}: {module.describe()}")
        for check in run_checks(module.Operations()):
            failed += not check.passed
            report["backends"][name]["checks"].append(vars(check))
            show(f"  {'PASS' if check.passed else 'FAIL'} {check.name}: {check.detail}")
    if available():
        report["auto"] = choose("auto", apple_silicon=apple_silicon())
        show(f"--backend auto is {report['auto']} here")
    if as_json:
        click.echo(json.dumps(report))
    sys.stdout.flush()
    if not available():
        raise BackendError(f"no backend is installed; pip install {' or '.join(BACKENDS.values())}")
    if failed:
        raise BackendError(f"{failed} operations differ from the oracle on this machine; please report this output")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
