"""Server-sent events come whole, however the bytes were cut."""

import pytest
from playwright.sync_api import Page

READ = """async ([bytes, cuts]) => {
  const { events } = await import("/page/sse.js");
  const data = new Uint8Array(bytes);
  const places = [0, ...cuts, data.length];
  const stream = new ReadableStream({
    start(controller) {
      for (let i = 1; i < places.length; i++) controller.enqueue(data.slice(places[i - 1], places[i]));
      controller.close();
    },
  });
  const found = [];
  for await (const event of events(stream)) found.push(event);
  return found;
}"""

TEXT = ': hello\ndata: {"a": "é日😀"}\n\nevent: x\ndata:one\ndata:  two\nid: 3\n\n\ndata: [DONE]\n\n'
WANT = ['{"a": "é日😀"}', "one\n two", "[DONE]"]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_an_event_is_whole_wherever_the_bytes_are_cut(page: Page, end: str) -> None:
    data = list(TEXT.replace("\n", end).encode())
    for cut in range(len(data) + 1):
        assert page.evaluate(READ, [data, [cut]]) == WANT, cut
    assert page.evaluate(READ, [data, list(range(1, len(data)))]) == WANT


def test_an_event_without_its_empty_line_is_none(page: Page) -> None:
    assert page.evaluate(READ, [list(b"data: a\n\ndata: b\n"), []]) == ["a"]


def test_who_stops_listening_closes_the_stream(page: Page) -> None:
    stopped = page.evaluate(
        """async () => {
          const { events } = await import("/page/sse.js");
          let stopped = false;
          const stream = new ReadableStream({
            pull: (controller) => controller.enqueue(new TextEncoder().encode("data: a\\n\\n")),
            cancel: () => { stopped = true; },
          });
          for await (const event of events(stream)) break;
          await Promise.resolve();
          return stopped;
        }"""
    )
    assert stopped
