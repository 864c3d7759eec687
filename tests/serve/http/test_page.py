"""The chat page in a real browser against a real server: what a user does, and what must not happen to one."""

import fnmatch
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import PAGE_FILES, Visitor, chromium, visiting
from chat_templates import QWEN3
from playwright.sync_api import Browser, Locator, Page, Route, expect
from scripted import character_tokenizer

from kvarn.serve.http.page import PATHS
from kvarn.serve.http.security import Security

ROOT = Path(__file__).resolve().parents[3]
HOSTILE = """\
<script>pwned=1</script><img src=x onerror=pwned=1>
[click](javascript:pwned=1) ![i](https://evil.example/i.png) [ok](https://ok.example)

```"><script>pwned=1</script>
<iframe src=https://evil.example></iframe>
```
"""
WIDE = f"{'W' * 100}\n\n| {' | '.join(['column'] * 10)} |\n|{'---|' * 10}\n\n```\n{'x' * 100}\n```\n"
ANSWERS = {
    "hostile": HOSTILE,
    "wide": WIDE,
    "think": "<think>\n3 is odd\n</think>\n\nNo, 3 is odd.",
    "long": "word " * 60,
    "endless": "word " * 1000,
}
PHONE = {"viewport": {"width": 360, "height": 640}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}


def answer_to(prompt: str) -> str:
    """What the scripted model says: one of ANSWERS, or an echo of the last message."""
    said = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    return ANSWERS.get(said, f"You said **{said}**.")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return character_tokenizer(tmp_path_factory.mktemp("tokenizer"), QWEN3), answer_to


@pytest.fixture(scope="module")
def chatty(script: Any, serve: Any) -> Iterator[Any]:
    """A server with a scripted model, which the tests of this file share; they leave it idle."""
    with serve(script=script, context=512) as server:
        yield server


@pytest.fixture
def visit(browser: Browser, chatty: Any) -> Iterator[Visitor]:
    with visiting(browser, chatty.url) as visitor:
        arrive(visitor.page, chatty.url)
        yield visitor


def arrive(page: Page, url: str) -> None:
    page.goto(url)
    expect(page.locator("#model")).to_contain_text("tokens of context")


def reload(page: Page) -> None:
    page.reload()
    expect(page.locator("#model")).to_contain_text("tokens of context")


def send(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_label("Message", exact=True).press("Enter")


def answers(page: Page) -> Locator:
    return page.get_by_role("article", name="Answer")


def ask(page: Page, text: str) -> Locator:
    """Send a message and wait for the end of its answer."""
    count = answers(page).count()
    send(page, text)
    expect(answers(page)).to_have_count(count + 1)
    last = answers(page).last
    expect(last).to_have_attribute("aria-busy", "false")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()  # its figures have come, it is kept
    return last


def titles(page: Page) -> list[str]:
    return page.locator("#conversations .open").all_inner_texts()


def new(page: Page) -> None:
    page.get_by_role("button", name="New conversation").first.click()


# The files.


def test_every_file_has_its_type_a_strict_policy_and_a_tag(server: Any) -> None:
    types = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    assert {path.rpartition("/")[2] or "index.html" for path in PATHS} == {
        file.name for file in PAGE_FILES.iterdir() if file.suffix[1:] in types
    }
    for path in PATHS:
        answer = server.http.get(path)
        assert answer.status_code == 200
        assert (
            answer.headers["content-type"].partition(";")[0]
            == types[path.rpartition(".")[2] if "." in path else "html"]
        )
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy.pop("default-src") == policy.pop("frame-ancestors") == "'none'"
        assert policy.pop("base-uri") == policy.pop("form-action") == policy.pop("trusted-types") == "'none'"
        assert policy.pop("require-trusted-types-for") == "'script'"
        assert set(policy.values()) == {"'self'"}, "no unsafe-inline, no other site, no scheme"
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = server.http.get(path, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert server.http.post(path, json={}).status_code == 405


def test_every_file_is_in_the_wheel() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for file in PAGE_FILES.iterdir():
        if file.is_file() and file.suffix != ".py":
            assert any(fnmatch.fnmatch(file.name, pattern) for pattern in patterns["kvarn.serve.page"]), file.name


def test_a_link_on_another_page_opens_this_one_and_nothing_else(server: Any) -> None:
    click = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert server.http.get("/", headers=click).status_code == 200
    for changed in ({"sec-fetch-dest": "iframe"}, {"sec-fetch-mode": "no-cors"}, {"origin": "https://evil.example"}):
        assert server.http.get("/", headers=click | changed).status_code == 403
    for path in ("/v1/models", "/v1/cache", "/metrics", "/page/page.js"):
        assert server.http.get(path, headers=click).status_code == 403


# Talking.


def test_an_answer_streams_and_says_how_it_went(visit: Visitor, chatty: Any) -> None:
    page = visit.page
    expect(page.locator(".intro")).to_contain_text("org/fake answers")
    chatty.backend.close_gate()
    send(page, "long")
    answer = answers(page).last
    expect(answer).to_contain_text("Reading the prompt")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    chatty.backend.gate.release(20)
    expect(answer.locator(".markdown")).to_contain_text("word wor")
    assert len(answer.locator(".markdown").inner_text()) < 30
    expect(answer).to_have_attribute("aria-busy", "true")
    chatty.backend.open_gate()
    expect(answer).to_have_attribute("aria-busy", "false")
    expect(answer.locator(".markdown")).to_have_text(("word " * 60).strip())
    prompt = len("<|im_start|>user\nlong<|im_end|>\n<|im_start|>assistant\n")
    expect(answer.locator(".figures")).to_have_text(
        re.compile(r"^300 tokens · \d+\.\d tokens/s · first after \d+\.\d s · prompt \d+ tokens, 0 cached$")
    )
    expect(page.get_by_role("status")).to_have_text("The answer is complete")
    figures = answer.locator(".figures").inner_text()
    read = int(figures.rpartition("prompt ")[2].split()[0])
    assert read < prompt, "a control token is one token"
    kv = chatty.http.get("/v1/cache", params={"tokens": read + 300}).json()["kv"]
    exact, held = kv["sequence"]["bytes_exact"], kv["sequence"]["bytes"]
    assert exact == -(-(read + 300) // 64) * 256
    share = round(100 * held / exact)
    expect(page.locator("#totals")).to_contain_text(
        f"0 of {read} prompt tokens cached · KV {held} B, exact {exact / 1024:.1f} KiB ({share} %)"
    )


def test_a_second_turn_is_read_from_the_cache(visit: Visitor) -> None:
    ask(visit.page, "long")
    answer = ask(visit.page, "and then?")
    expect(answer.locator("strong")).to_have_text("and then?")
    cached = re.search(r"prompt (\d+) tokens, (\d+) cached", answer.locator(".figures").inner_text())
    assert cached is not None
    assert int(cached[2]) >= 256
    first, second = visit.bodies()
    assert [m["content"] for m in first["messages"]] == ["long"]
    assert [m["role"] for m in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][1]["content"] == "word " * 60
    assert "temperature" not in second


@pytest.mark.parametrize("way", ["Escape", "button"])
def test_stopping_ends_the_answer_on_the_server_too(visit: Visitor, chatty: Any, until: Any, way: str) -> None:
    page = visit.page
    chatty.backend.close_gate()
    send(page, "long")
    chatty.backend.gate.release(20)
    expect(answers(page).last.locator(".markdown")).to_contain_text("word")
    if way == "Escape":
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Stop").click()
    expect(answers(page).last.locator(".figures")).to_have_text(re.compile("^stopped · "))
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    made = len(chatty.backend.plans)
    chatty.backend.open_gate()
    until(chatty.idle)
    assert len(chatty.backend.plans) < made + 20, "it did not go on to the end"
    reload(page)
    expect(answers(page).last.locator(".markdown")).to_contain_text("word")
    assert ask(page, "more").locator("strong").inner_text() == "more"


def test_regenerate_asks_again_and_an_edited_message_replaces_what_follows(visit: Visitor) -> None:
    page = visit.page
    ask(page, "one")
    ask(page, "two")
    expect(page.get_by_role("button", name="Regenerate")).to_have_count(1)
    page.get_by_role("button", name="Regenerate").click()
    expect(answers(page).last).to_have_attribute("aria-busy", "false")
    expect(answers(page)).to_have_count(2)
    page.get_by_role("button", name="Edit").first.click()
    editor = page.get_by_label("Edit the message")
    expect(editor).to_be_focused()
    expect(editor).to_have_value("one")
    page.get_by_role("button", name="Cancel").click()
    expect(answers(page)).to_have_count(2)
    page.get_by_role("button", name="Edit").first.click()
    editor.fill("three")
    page.get_by_role("button", name="Send again").click()
    expect(answers(page)).to_have_count(1)
    expect(answers(page).locator("strong")).to_have_text("three")
    said = [[m["content"] for m in body["messages"]] for body in visit.bodies()]
    assert said[1] == said[2] == ["one", "You said **one**.", "two"]
    assert said[3] == ["three"]


def test_system_prompt_and_temperature_are_the_conversations_own(visit: Visitor) -> None:
    page = visit.page
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be\nbrief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Title").fill("Mine")
    page.get_by_role("button", name="Save").click()
    ask(page, "hi")
    assert titles(page) == ["Mine"]
    new(page)
    ask(page, "ho")
    reload(page)
    page.locator("#conversations").get_by_role("button", name="Mine", exact=True).click()
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("System prompt")).to_have_value("Be\nbrief.")
    expect(page.get_by_label("Temperature")).to_have_value("0.5")
    page.keyboard.press("Escape")
    mine, other = visit.bodies()
    assert (mine["messages"][0], mine["temperature"]) == ({"role": "system", "content": "Be\nbrief."}, 0.5)
    assert other["messages"] == [{"role": "user", "content": "ho"}]
    assert "temperature" not in other


def test_shift_and_enter_begin_a_new_line_and_nothing_empty_is_sent(visit: Visitor) -> None:
    page, box = visit.page, visit.page.get_by_label("Message", exact=True)
    expect(box).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.type(" ")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_disabled()
    box.fill("a")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("b")
    page.get_by_role("button", name="Send", exact=True).click()
    expect(answers(page).last).to_have_attribute("aria-busy", "false")
    expect(page.get_by_role("article", name="You").locator(".text")).to_have_text("a\nb")
    assert [body["messages"][0]["content"] for body in visit.bodies()] == ["a\nb"]


def test_thoughts_are_folded_away_and_not_sent_back(visit: Visitor) -> None:
    page = visit.page
    answer = ask(page, "think")
    expect(answer.locator(".markdown")).to_have_text("No, 3 is odd.")
    thought = answer.get_by_text("3 is odd", exact=True)
    expect(thought).to_be_hidden()
    answer.get_by_text("Thoughts").click()
    expect(thought).to_be_visible()
    ask(page, "on")
    assert visit.bodies()[1]["messages"][1] == {"role": "assistant", "content": "No, 3 is odd."}


def test_an_answer_that_fills_the_context_says_so(visit: Visitor) -> None:
    expect(ask(visit.page, "endless").locator(".figures")).to_contain_text("cut at the end of the context")


def test_copy_gives_the_source(visit: Visitor) -> None:
    page = visit.page
    visit.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer = ask(page, "hostile")
    for button, text in (
        (answer.locator(".tools button").first, HOSTILE),
        (answer.locator(".code button"), "<iframe src=https://evil.example></iframe>"),
        (page.locator(".user button").last, "hostile"),
    ):
        button.click()
        expect(button).to_have_text("Copied")
        assert page.evaluate("() => navigator.clipboard.readText()") == text


# Conversations.


def test_conversations_survive_a_reload_and_are_deleted_for_good(visit: Visitor) -> None:
    page = visit.page
    ask(page, "first")
    new(page)
    expect(page.get_by_role("article")).to_have_count(0)
    ask(page, "second")
    reload(page)
    assert titles(page) == ["second", "first"]
    expect(answers(page).locator("strong")).to_have_text("second")
    page.locator("#conversations").get_by_role("button", name="first", exact=True).click()
    expect(answers(page).locator("strong")).to_have_text("first")
    expect(answers(page).locator(".figures")).to_contain_text("tokens/s")
    page.once("dialog", lambda dialog: dialog.dismiss())
    page.get_by_role("button", name="Delete first").click()
    assert titles(page) == ["second", "first"]
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete first").click()
    reload(page)
    assert titles(page) == ["second"]


def test_an_answer_goes_on_while_another_conversation_is_open(visit: Visitor, chatty: Any) -> None:
    page = visit.page
    chatty.backend.close_gate()
    send(page, "long")
    new(page)
    expect(page.locator("#conversations .running")).to_have_count(1)
    chatty.backend.open_gate()
    expect(page.locator("#conversations .running")).to_have_count(0)
    assert page.get_by_role("article").count() == 0
    page.locator("#conversations").get_by_role("button", name="long", exact=True).click()
    expect(answers(page).locator(".markdown")).to_have_text(("word " * 60).strip())


def test_two_tabs_show_the_same_conversations(visit: Visitor) -> None:
    page = visit.page
    ask(page, "first")
    other = visit.context.new_page()
    visit.watch(other)
    arrive(other, visit.origin)
    expect(answers(other).locator("strong")).to_have_text("first")
    ask(other, "second")
    expect(answers(page)).to_have_count(2)
    ask(page, "third")
    expect(answers(other)).to_have_count(3)


def test_conversations_go_into_a_file_and_come_back(visit: Visitor, tmp_path: Path) -> None:
    page = visit.page
    ask(page, "think")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    file = tmp_path / download.value.suggested_filename
    download.value.save_as(file)
    kept = page.evaluate("() => Object.values({ ...localStorage })")
    assert json.loads(file.read_text())["conversations"] == [json.loads(text) for text in kept]
    page.locator("#import-file").set_input_files(file)
    expect(page.locator("#conversations .open")).to_have_count(2)
    expect(answers(page).locator(".markdown")).to_have_text("No, 3 is odd.")
    assert ask(page, "on").locator("strong").inner_text() == "on"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "the file is not JSON"),
        ("[]", "holds no conversations that this page exported"),
        ('{"format": "kvarn conversations", "version": 2, "conversations": []}', "holds no conversations"),
        (
            '{"format": "kvarn conversations", "version": 1, "conversations": [{"id": 1}]}',
            "conversation 1 of the file is",
        ),
        (
            '{"format": "kvarn conversations", "version": 1, "conversations": '
            '[{"id": "a", "messages": [{"role": "system", "text": "x"}]}]}',
            "conversation 1 of the file is damaged",
        ),
    ],
)
def test_a_file_that_is_none_of_ours_is_refused(visit: Visitor, tmp_path: Path, text: str, fault: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    visit.page.locator("#import-file").set_input_files(file)
    expect(visit.page.get_by_role("alert")).to_contain_text("Nothing was imported: ")
    expect(visit.page.get_by_role("alert")).to_contain_text(fault)
    assert titles(visit.page) == []


def test_a_full_storage_is_said_and_the_conversation_goes_on(visit: Visitor) -> None:
    page = visit.page
    page.evaluate("""() => {
      for (let size = 2 ** 22; size >= 1; size = Math.floor(size / 2)) {
        try { for (;;) localStorage.setItem(`x${Math.random()}`, "x".repeat(size)); } catch {}
      }
    }""")
    answer = ask(page, "long")
    expect(page.get_by_role("alert")).to_contain_text(
        re.compile(r"storage is full: this conversation \(\d+ KiB\) is not kept. Export and delete some.")
    )
    expect(answer.locator(".markdown")).to_contain_text("word word")
    page.get_by_role("alert").get_by_role("button", name="Close").click()
    expect(page.get_by_role("alert")).to_be_hidden()
    assert ask(page, "on").locator("strong").inner_text() == "on"


# Hostile data.


def assert_harmless(page: Page) -> None:
    assert page.evaluate("() => window.pwned ?? null") is None
    assert page.locator("body :is(script, img, iframe, svg, style, link, object, embed, base)").count() == 0
    links = page.locator("#log a").evaluate_all("nodes => nodes.map((node) => [node.href, node.rel])")
    assert all(href.startswith("https://") and rel == "noopener noreferrer" for href, rel in links)


def test_a_hostile_answer_does_nothing(visit: Visitor) -> None:
    page = visit.page
    answer = ask(page, "hostile")
    expect(answer).to_contain_text("<script>pwned=1</script><img src=x onerror=pwned=1>")
    expect(answer.get_by_role("link")).to_have_text(["i", "ok"])
    assert_harmless(page)
    reload(page)
    expect(answers(page)).to_contain_text("onerror")
    assert_harmless(page)


def test_hostile_words_of_the_user_and_of_a_file_do_nothing(visit: Visitor, tmp_path: Path) -> None:
    page, evil = visit.page, '"><img src=x onerror=pwned=1><script>pwned=1</script>'
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Title").fill(evil)
    page.get_by_label("System prompt").fill(evil)
    page.get_by_role("button", name="Save").click()
    ask(page, evil)
    reload(page)
    expect(page.locator("#title")).to_have_text(evil)
    assert_harmless(page)
    message = {"role": "assistant", "text": HOSTILE, "reasoning": evil, "state": "failed", "error": evil}
    figures = {"rate": evil, "answerTokens": evil, "kvBytes": 3, "toString": evil, "__proto__": {"pwned": 1}}
    strange = {
        "id": "__proto__",
        "title": evil,
        "system": evil,
        "temperature": evil,
        "messages": [{"role": "user", "text": evil, "extra": evil}, {**message, "figures": figures}],
    }
    file = tmp_path / "evil.json"
    whole = {"format": "kvarn conversations", "version": 1, "conversations": [strange, strange]}
    file.write_text(json.dumps(whole))
    page.locator("#import-file").set_input_files(file)
    expect(page.locator("#conversations .open")).to_have_count(3)
    expect(answers(page).locator(".error")).to_contain_text(evil)
    assert_harmless(page)
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("Temperature")).to_have_value("")
    page.keyboard.press("Escape")
    assert_harmless(page)


def test_the_browser_itself_would_stop_markup(visit: Visitor) -> None:
    attempts = {
        "TrustedHTML": "document.body.innerHTML = '<p>x</p>'",
        "TrustedScript": "setTimeout(() => eval('window.pwned = 1'))",
        "TrustedScriptURL": "document.createElement('script').src = 'data:,pwned=1'",
        "img-src": "new Image().src = 'https://evil.example'",
        "connect-src": "fetch('https://evil.example').catch(() => 0)",
        "form-action": "const f = document.createElement('form'); f.action = 'https://evil.example'; "
        "document.body.append(f); f.submit()",
    }
    for word, attempt in attempts.items():
        visit.faults.clear()
        visit.page.evaluate(
            f"async () => {{ try {{ {attempt} }} catch {{}} await new Promise((r) => setTimeout(r, 50)); }}"
        )
        assert word in "".join(visit.faults), "or the watch of these tests is blind"
    assert visit.page.evaluate("() => window.pwned ?? null") is None
    visit.faults.clear()
    own = [request for request in visit.requests if request.url.startswith(visit.origin)]
    assert all(request.failure for request in visit.requests if request not in own)
    visit.requests[:] = own


# Faults of the server.


def test_a_refusal_is_shown_as_the_server_says_it_and_can_be_tried_again(visit: Visitor, chatty: Any) -> None:
    page, long = visit.page, "x" * 600
    send(page, long)
    answer = answers(page).last
    refused = chatty.chat(messages=[{"role": "user", "content": long}])
    assert refused.status_code == 400
    expect(answer.locator(".error")).to_contain_text(refused.json()["error"]["message"])
    expect(answer.get_by_role("button", name="Regenerate")).to_be_hidden()
    reload(page)
    answer.get_by_role("button", name="Try again").click()
    expect(answer.locator(".error")).to_contain_text(refused.json()["error"]["message"])
    assert len(visit.bodies()) == 2
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").fill("short")
    page.get_by_role("button", name="Send again").click()
    expect(answer.locator("strong")).to_have_text("short")
    expect(answer.locator(".error")).to_be_hidden()


HALF = 'data: {"choices":[{"delta":{"content":"half"},"finish_reason":null}]}\n\n'


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (HALF, "The connection ended before the answer was whole."),
        (HALF + 'data: {"error":{"message":"out of <b>luck</b>","code":"fault"}}\n\n', "out of <b>luck</b>"),
        (HALF + "data: {nonsense\n\n", "The connection broke before the answer was whole"),
        (None, "The server does not answer. Is it still running?"),
    ],
)
def test_an_answer_that_breaks_off_keeps_its_half_and_says_why(visit: Visitor, body: str | None, fault: str) -> None:
    page, where = visit.page, "**/v1/chat/completions"

    def broken(route: Route) -> None:
        if body is None:
            route.abort()
        else:
            route.fulfill(body=body, content_type="text/event-stream")

    page.route(where, broken)
    send(page, "hi")
    answer = answers(page).last
    expect(answer.locator(".error")).to_contain_text(fault)
    expect(answer.locator(".markdown")).to_have_text("half" if body else "")
    page.unroute(where)
    expect(page.locator("#model")).to_contain_text("tokens of context")
    answer.get_by_role("button", name="Try again").click()
    expect(answer.locator("strong")).to_have_text("hi")


def test_a_server_that_still_loads_is_waited_for(browser: Browser, serve: Any, server: Any) -> None:
    with serve(ready=False) as own, visiting(browser, own.url) as visitor:
        page = visitor.page
        page.goto(own.url)
        message = own.http.get("/v1/models").json()["error"]["message"]
        expect(page.locator("#model")).to_have_text(message)
        page.get_by_label("Message", exact=True).fill("hi")
        expect(page.get_by_role("button", name="Send", exact=True)).to_be_disabled()
        page.get_by_label("Message", exact=True).press("Enter")
        expect(page.get_by_label("Message", exact=True)).to_have_value("hi")
        expect(page.get_by_role("article")).to_have_count(0)
        tokenizer = server.service.served.tokenizer
        own.on_loop(lambda: own.service.open(own.engine, tokenizer, ("org/late",)))
        expect(page.locator("#model")).to_contain_text("org/late · 1024 tokens of context")
        page.get_by_label("Message", exact=True).press("Enter")
        expect(answers(page).locator(".figures")).to_contain_text("token")
        page.keyboard.press("Escape")
        expect(answers(page)).to_have_attribute("aria-busy", "false")


def test_the_key_is_asked_for_and_kept_by_this_tab_only(browser: Browser, serve: Any, script: Any) -> None:
    key = "schlüssel-1"
    with serve(security=Security(keys=(key,)), script=script) as own, visiting(browser, own.url) as visitor:
        page = visitor.page
        page.goto(own.url)
        dialog = page.get_by_role("dialog", name="This server asks for an API key")
        expect(dialog).to_be_visible()
        dialog.get_by_label("API key").fill("wrong")
        dialog.get_by_role("button", name="Use this key").click()
        expect(dialog.locator(".error")).to_contain_text("the API key is missing or wrong")
        page.keyboard.press("Escape")
        send(page, "hi")
        expect(dialog).to_be_visible()
        dialog.get_by_label("API key").fill(key)
        dialog.get_by_label("API key").press("Enter")
        expect(page.locator("#model")).to_contain_text("tokens of context")
        expect(page.get_by_label("Message", exact=True)).to_have_value("hi")
        assert ask(page, "hi").locator("strong").inner_text() == "hi"
        assert key not in page.evaluate("() => JSON.stringify(localStorage)")
        reload(page)
        assert ask(page, "ho").locator("strong").inner_text() == "ho"
        expect(dialog).to_be_hidden()


# How it looks.


def test_a_phone_shows_everything_without_sideways_scrolling(browser: Browser, chatty: Any) -> None:
    with visiting(browser, chatty.url, **PHONE) as visitor:
        page = visitor.page
        arrive(page, chatty.url)
        width = "() => [document.documentElement.scrollWidth, document.querySelector('#log').scrollWidth, innerWidth]"
        ask(page, "wide")
        ask(page, "y" * 200)
        assert page.evaluate(width) == [360, 360, 360]
        for selector in (".code pre", ".table"):
            assert page.locator(selector).evaluate("node => node.scrollWidth > node.clientWidth"), (
                "it scrolls by itself"
            )
        sizes = page.locator("input, textarea").evaluate_all("nodes => nodes.map((n) => getComputedStyle(n).fontSize)")
        assert set(sizes) == {"16px"}, "or a phone zooms in"
        small = page.locator("button:visible").evaluate_all(
            "nodes => nodes.filter((n) => n.getBoundingClientRect().height < 44).map((n) => n.textContent)"
        )
        assert small == []
        sidebar = page.get_by_role("navigation", name="Conversations")
        expect(sidebar).to_be_hidden()
        page.get_by_role("button", name="Open the list").click()
        expect(sidebar).to_be_visible()
        page.keyboard.press("Escape")
        expect(sidebar).to_be_hidden()
        expect(page.get_by_role("button", name="Open the list")).to_be_focused()
        page.get_by_role("button", name="Open the list").click()
        new(page)
        expect(sidebar).to_be_hidden()
        assert page.evaluate(width) == [360, 360, 360]
        page.set_viewport_size({"width": 360, "height": 300})  # what a keyboard leaves
        expect(page.get_by_label("Message", exact=True)).to_be_in_viewport(ratio=1)


CONTRAST = """() => {
  const rgb = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const back = (node) => {
    for (; node; node = node.parentElement) {
      const color = rgb(getComputedStyle(node).backgroundColor);
      if (color[3] !== 0) return color;
    }
  };
  const low = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility({ visibilityProperty: true }) || node.matches(":disabled")) continue;
    const [a, b] = [light(rgb(getComputedStyle(node).color)), light(back(node))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) low.push([node.outerHTML.slice(0, 90), (a + 0.05) / (b + 0.05)]);
  }
  return { low, back: light(back(document.body)) };
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes_are_legible(browser: Browser, chatty: Any, scheme: str) -> None:
    with visiting(browser, chatty.url, color_scheme=scheme) as visitor:
        page = visitor.page
        arrive(page, chatty.url)
        ask(page, "hostile")
        ask(page, "think").get_by_text("Thoughts").click()
        send(page, "x" * 600)
        expect(answers(page).last.locator(".error")).to_be_visible()
        seen = page.evaluate(CONTRAST)
        assert seen["low"] == []
        assert (seen["back"] > 0.5) == (scheme == "light")


def test_every_control_has_a_name_and_the_keyboard_reaches_the_message(visit: Visitor) -> None:
    page = visit.page
    ask(page, "hostile")
    unnamed = page.locator("button, input, textarea, summary, a, [tabindex='0']").evaluate_all("""nodes => nodes
      .filter((n) => !(n.textContent.trim() || n.getAttribute("aria-label") || n.labels?.length))
      .map((n) => n.outerHTML)""")
    assert unnamed == []
    first = page.locator("button:visible, input:visible, textarea:visible, summary, a, [tabindex='0']").first
    expect(first).to_have_text("Skip to the message box")
    first.focus()
    expect(first).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
