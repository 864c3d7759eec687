"""A headless Chromium that watches the page: what it asks for, and every fault that the browser reports."""

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WAIT_MS = 15_000  # on a busy machine
PAGE_FILES = Path(__file__).resolve().parents[2] / "serve" / "page"
WATCH = """
addEventListener("securitypolicyviolation", (event) =>
  console.error(`policy: ${event.violatedDirective} ${event.blockedURI} ${event.sample}`));
"""


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """The browser that this machine has; skips the tests where there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)}")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=ARGUMENTS)
        yield browser
        browser.close()


@dataclasses.dataclass
class Visitor:
    """One visitor with a storage of their own."""

    origin: str
    context: BrowserContext
    page: Page
    faults: list[str] = dataclasses.field(default_factory=list)
    requests: list[Request] = dataclasses.field(default_factory=list)

    def watch(self, page: Page) -> None:
        """Note the faults of a page; every page of the context must come through here."""

        def console(message: ConsoleMessage) -> None:
            # An answer of 4xx or 5xx is logged by the browser; what the page makes of it is the test's matter.
            if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
                self.faults.append(message.text)

        page.on("console", console)
        page.on("pageerror", lambda error: self.faults.append(str(error)))

    def bodies(self) -> list[dict[str, Any]]:
        """What was posted, in order."""
        return [request.post_data_json for request in self.requests if request.method == "POST"]


@contextlib.contextmanager
def visiting(browser: Browser, origin: str, **options: Any) -> Iterator[Visitor]:
    """A visitor of `origin`; at the end no fault was seen and no request has left the origin."""
    context = browser.new_context(**options)
    context.set_default_timeout(WAIT_MS)
    expect.set_options(timeout=WAIT_MS)
    context.add_init_script(WATCH)
    visitor = Visitor(origin, context, context.new_page())
    visitor.watch(visitor.page)
    context.on("request", lambda request: visitor.requests.append(request))
    yield visitor
    context.close()
    assert visitor.faults == []
    assert [r.url for r in visitor.requests if not r.url.startswith((f"{origin}/", f"blob:{origin}/"))] == []


@contextlib.contextmanager
def modules(browser: Browser) -> Iterator[Page]:
    """An empty page under the page's own policy, whose modules can be imported; there is no server behind it."""
    from kvarn.serve.http.page import HEADERS

    origin = "http://page.test"
    types = {".js": "text/javascript", ".html": "text/html"}

    with visiting(browser, origin) as visitor:

        def answer(route: Any) -> None:
            name = route.request.url.rpartition("/")[2]
            if not name:
                route.fulfill(body="<!doctype html><title>empty</title>", content_type="text/html", headers=HEADERS)
            else:
                file = PAGE_FILES / name
                route.fulfill(body=file.read_bytes(), headers={**HEADERS, "content-type": types[file.suffix]})

        visitor.context.route(f"{origin}/**", answer)
        visitor.page.goto(f"{origin}/")
        yield visitor.page
