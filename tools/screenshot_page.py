"""Make the pictures of the chat page in docs/: a real server, real answers, a headless Chromium. Extra: `test`.

python tools/screenshot_page.py demo docs
"""

import contextlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import httpx
from playwright.sync_api import Browser, Page, expect, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
ANSWER_MS = 90_000  # the most that one answer may take
SHOTS: dict[str, dict[str, Any]] = {
    "page-desktop.png": {"viewport": {"width": 1100, "height": 720}, "color_scheme": "light"},
    "page-phone.png": {
        "viewport": {"width": 390, "height": 780},
        "color_scheme": "dark",
        "has_touch": True,
        "is_mobile": True,
        "device_scale_factor": 1.5,
    },
}
README = Path(__file__).resolve().parents[1] / "README.md"
SYSTEM = "You are a helpful assistant. Answer briefly, with Markdown."
BACKGROUND = f"This is background:\n\n{README.read_text()[:5000]}\n\n{SYSTEM}"  # some tiles to be kept and sealed
TALK = {
    "Three good habits": ["Name three good habits for a healthy life, as a short list."],
    "The sky, and a sum": [
        "Explain in two sentences why the sky is blue.",
        "Write a short Python function that adds two numbers.",
    ],
}


def ready(url: str) -> bool:
    """Whether the server has loaded its model."""
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@contextlib.contextmanager
def server(model: str) -> Iterator[str]:
    """`kvarn serve` on a free port, without the user's disk cache; its address once it answers."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "kvarn.serve.cli", "serve", model, "--port", str(port), "--no-cache"]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command) as process:
        try:
            while not ready(url):
                if process.poll() is not None:
                    raise click.ClickException(f"kvarn serve ended with code {process.returncode}")
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()


def talk(page: Page, title: str, messages: list[str]) -> None:
    """Hold one conversation, greedily, and wait for its answers."""
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill(BACKGROUND)
    page.get_by_label("Title").fill(title)
    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Save").click()
    for message in messages:
        page.get_by_label("Message", exact=True).fill(message)
        page.get_by_role("button", name="Send", exact=True).click()
        expect(page.get_by_role("button", name="Stop")).to_be_hidden(timeout=ANSWER_MS)
        expect(page.locator("#totals")).to_have_text(re.compile("KV .* exact"))


@click.command()
@click.argument("model")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
def main(model: str, folder: Path) -> None:
    """Write page-desktop.png (light) and page-phone.png (dark) into FOLDER."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        raise click.ClickException(f"no browser; install one of {', '.join(BROWSERS)}")
    with server(model) as url, sync_playwright() as driver:
        browser: Browser = driver.chromium.launch(executable_path=found, args=ARGUMENTS)
        with tempfile.TemporaryDirectory() as held:
            state: Path | None = None
            for name, options in SHOTS.items():
                context = browser.new_context(**options, storage_state=state)
                page = context.new_page()
                page.goto(url)
                if state is None:  # the later pictures show the same conversations
                    for title, messages in TALK.items():
                        page.get_by_role("button", name="New conversation").first.click()
                        talk(page, title, messages)
                    state = Path(held) / "state.json"
                    context.storage_state(path=state)
                expect(page.locator("#model")).to_contain_text("tokens of context")
                page.get_by_role("article").first.wait_for()
                page.screenshot(path=folder / name)
                click.echo(f"{folder / name}: {(folder / name).stat().st_size / 1024:.0f} KB")
                context.close()
        browser.close()


if __name__ == "__main__":
    main()
