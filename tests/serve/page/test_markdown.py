"""Markdown becomes a few kinds of nodes, and nothing that a text holds becomes anything else."""

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from playwright.sync_api import Page

SHOW = """async (texts) => {
  const { showMarkdown } = await import("/page/markdown.js");
  const box = document.createElement("div");
  for (const text of texts) showMarkdown(box, text);
  return box.innerHTML;
}"""

# Every element and attribute that may come out, and the addresses of links.
AUDIT = """async (text) => {
  const { showMarkdown } = await import("/page/markdown.js");
  const box = document.createElement("div");
  document.body.replaceChildren(box);
  showMarkdown(box, text);
  const found = [];
  for (const node of box.querySelectorAll("*")) {
    found.push([node.localName, node.getAttributeNames().filter((name) => name !== "href"), node.href ?? null]);
  }
  return { found, pwned: window.pwned ?? null };
}"""
TAGS = {
    *("p", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "hr", "br", "strong", "em", "del", "code", "pre"),
    *("div", "span", "button", "a", "table", "thead", "tbody", "tr", "th", "td"),
}
ATTRIBUTES = {"class", "dir", "type", "tabindex", "role", "aria-label", "start", "rel", "target"}

LINK = '<a href="{0}" target="_blank" rel="noopener noreferrer">{1}</a>'
P = '<p dir="auto">{}</p>'
CASES = {
    "a\nb": P.format("a<br>b"),
    "a\n\nb": P.format("a") + P.format("b"),
    "# One #\n### Three": '<h3 dir="auto">One</h3><h5 dir="auto">Three</h5>',
    "#no heading": P.format("#no heading"),
    "**b** *i* __b__ _i_ ~~d~~ `c`": P.format(
        "<strong>b</strong> <em>i</em> <strong>b</strong> <em>i</em> <del>d</del> <code>c</code>"
    ),
    "***both***": P.format("<strong><em>both</em></strong>"),
    "**a *b* c**": P.format("<strong>a <em>b</em> c</strong>"),
    "2 * 3 * 4, snake_case_name, a ** b": P.format("2 * 3 * 4, snake_case_name, a ** b"),
    "``a ` b`` `unclosed": P.format("<code>a ` b</code> `unclosed"),
    "`**not bold** <b>`": P.format("<code>**not bold** &lt;b&gt;</code>"),
    r"\*plain\* \[x\](y)": P.format("*plain* [x](y)"),
    "[k](https://a.example/x_(y))": P.format(LINK.format("https://a.example/x_(y)", "k")),
    "[m](mailto:a@b.example)": P.format(LINK.format("mailto:a@b.example", "m")),
    "see https://a.example/b_c.": P.format(
        "see " + LINK.format("https://a.example/b_c", "https://a.example/b_c") + "."
    ),
    "<https://a.example>": P.format(LINK.format("https://a.example/", "https://a.example")),
    "![alt](https://a.example/i.png)": P.format(LINK.format("https://a.example/i.png", "alt")),
    "- a\n- b\n  - c": '<ul><li dir="auto">{}</li><li dir="auto">{}<ul><li dir="auto">{}</li></ul></li></ul>'.format(
        P.format("a"), P.format("b"), P.format("c")
    ),
    "3. a\n4. b": f'<ol start="3"><li dir="auto">{P.format("a")}</li><li dir="auto">{P.format("b")}</li></ol>',
    "> q\n> r": f"<blockquote>{P.format('q<br>r')}</blockquote>",
    "---": "<hr>",
    "| a | b |\n|---|--:|\n| 1 | x \\| y |": (
        '<div class="table" tabindex="0" role="group" aria-label="Table"><table><thead><tr><th class="left">a</th>'
        '<th class="right">b</th></tr></thead><tbody><tr><td class="left">1</td><td class="right">x | y</td></tr>'
        "</tbody></table></div>"
    ),
}
CODE = (
    '<div class="code"><div class="bar"><span>{}</span><button type="button" class="quiet">Copy</button></div>'
    '<pre tabindex="0"><code>{}</code></pre></div>'
)
CASES |= {
    "```py\nx = 1\n\n# y\n```\nz": CODE.format("py", "x = 1\n\n# y") + P.format("z"),
    "~~~\n```\n~~~": CODE.format("text", "```"),
    "```\nopen": CODE.format("text", "open"),
    "- a\n  ```\n  b\n  ```": f'<ul><li dir="auto">{P.format("a")}{CODE.format("text", "b")}</li></ul>',
}


@pytest.mark.parametrize("text", CASES)
def test_markdown_becomes(page: Page, text: str) -> None:
    assert page.evaluate(SHOW, [text]) == CASES[text]


HOSTILE = [
    "<script>pwned=1</script>",
    "<img src=x onerror=pwned=1>",
    "<svg onload=pwned=1><iframe srcdoc='<script>parent.pwned=1</script>'>",
    "[x](javascript:pwned=1)",
    "[x](  JaVaScRiPt:pwned=1 )",
    "[x](java\tscript:pwned=1)",
    "[x](data:text/html,<script>pwned=1</script>)",
    "[x](vbscript:x) [x](file:///etc/passwd) [x](//evil.example) [x](/v1/models) [x](blob:http://page.test/1)",
    "![x](javascript:pwned=1)",
    "![x](https://evil.example/i.png)",
    "<javascript:pwned=1> <https:javascript:pwned=1>",
    '[x](https://a.example "onclick=pwned=1")',
    '[x](https://a.example/"onmouseover="pwned=1)',
    "[<img src=x onerror=pwned=1>](https://a.example)",
    "`<script>pwned=1</script>`",
    '```"><script>pwned=1</script>\n</code></pre><script>pwned=1</script>\n```',
    "# <script>pwned=1</script>",
    "| <script>pwned=1</script> | b |\n|---|---|\n| <img src=x onerror=pwned=1> | [x](javascript:pwned=1) |",
    "- <style>*{display:none}</style>\n> <base href=https://evil.example>",
    "<a href=javascript:pwned=1>x</a><form action=https://evil.example><button>x</button></form>",
    "&lt;script&gt;pwned=1&lt;/script&gt; &#60;img src=x onerror=pwned=1&#62;",
    "\u202e\u0000\ufeff<scr\u0000ipt>pwned=1</script>",
    "[x](https://user:pw@evil.example) https://a.example/<script>pwned=1</script>",
]


def audit(page: Page, text: str) -> None:
    """Only the known elements and attributes, and links to the web or to a mailbox."""
    seen = page.evaluate(AUDIT, text)
    assert seen["pwned"] is None
    for tag, attributes, href in seen["found"]:
        assert tag in TAGS, text
        assert set(attributes) <= ATTRIBUTES, text
        assert (tag == "a") == (href is not None)
        if href is not None:
            assert href.startswith(("https://", "http://", "mailto:")), text
            assert {"rel", "target"} <= set(attributes)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(page: Page, text: str) -> None:
    audit(page, text)


PIECES = st.sampled_from([*"*_~`[]()<>!|#-+>\\ \n\t1.:h&;'\"", "```", "https://a.b", "javascript:x", "<img onerror=x>"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(PIECES, max_size=60).map("".join))
def test_any_text_stays_text_and_loses_no_word(page: Page, text: str) -> None:
    audit(page, f"first {text}\n\nlast")
    shown = page.evaluate("() => document.body.textContent")
    assert "first" in shown
    assert shown.rstrip().endswith("last")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(PIECES | st.sampled_from(["word", "- item\n", "| a | b |\n|--|--|\n"]), min_size=1, max_size=30))
def test_a_growing_text_ends_up_like_a_whole_one(page: Page, pieces: list[str]) -> None:
    steps = ["".join(pieces[: i + 1]) for i in range(len(pieces))]
    assert page.evaluate(SHOW, steps) == page.evaluate(SHOW, steps[-1:])


SLOW = [
    "[",
    "[a](",
    "![",
    "*",
    "**a ",
    "*a **b ",
    "_a ",
    "`",
    "`a``b",
    "~~a ",
    "<",
    "<https://",
    "https://a ",
    "http://(((",
    "\\",
    "> ",
    "- ",
    "> - ",
    "1. a\n",
    "  - a\n",
    "|",
    "a|b\n-|-\n",
    "```\n",
    "# ",
    "\n",
    " ",
    "[a](b (c) ",
    "- - -",
]


@pytest.mark.parametrize("piece", SLOW)
def test_hostile_text_costs_no_more_than_its_length(page: Page, piece: str) -> None:
    text = piece * (30_000 // len(piece))
    start = time.perf_counter()
    page.evaluate(SHOW, [text])
    assert time.perf_counter() - start < 3
