// Server-sent events from a stream of bytes, however it was cut into chunks.

/** The text of a stream of bytes, line by line, without line ends; characters may lie across chunks. */
export async function* lines(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
      // A CR at the very end may be half of a CR LF; it waits for the next chunk.
      const whole = rest.slice(0, done || !rest.endsWith("\r") ? undefined : -1);
      const parts = whole.split(/\r\n|\r|\n/);
      rest = parts.pop() + rest.slice(whole.length);
      yield* parts;
      if (done) {
        if (rest) yield rest;
        return;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // whoever stopped listening has no use for the error
  }
}

/** The data of each event; comments and other fields are skipped. */
export async function* events(stream) {
  let data = [];
  for await (const line of lines(stream)) {
    if (line === "") {
      if (data.length) yield data.join("\n");
      data = [];
    } else if (line.startsWith("data:")) {
      data.push(line.slice(line[5] === " " ? 6 : 5));
    }
  }
}
