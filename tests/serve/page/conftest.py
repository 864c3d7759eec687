"""An empty page in which the modules of serve/page can be imported."""

from collections.abc import Iterator

import pytest
from browser import chromium, modules
from playwright.sync_api import Page


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with chromium() as browser, modules(browser) as page:
        yield page
