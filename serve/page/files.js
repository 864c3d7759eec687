// Files out of the page and into it.

const MAX_BYTES = 32 * 2 ** 20; // more than a browser's storage takes

/** Let the browser save a text under a name. */
export function saveFile(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/** The text of a file that the user chose. */
export async function readFile(file) {
  if (file.size > MAX_BYTES) throw new Error(`the file has ${file.size} bytes, more than ${MAX_BYTES}`);
  return file.text();
}

/** A name for a file, from a title: letters, digits and dashes. */
export function fileName(title) {
  const plain = title.normalize("NFKD").replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60);
  return `${plain || "conversation"}.json`;
}
