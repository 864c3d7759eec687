"""What the kernels on paper share: the model, the bytes of its cache, and tables in Markdown.

tools/metal_on_paper.py and tools/cuda_on_paper.py count what their kernels do; nothing here runs or measures anything.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvarn.format import TileFormat
from kvarn.visibility import num_sealed

HALF, FLOAT = 2, 4  # bytes


@dataclass(frozen=True)
class Model:
    """A model's attention, and the bytes of its weights."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    weight_bytes: float
    layer_parameters: float  # those of all layers, which every token is multiplied with

    @property
    def ratio(self) -> int:
        return self.heads // self.kv_heads

    def exact_bytes(self, tokens: int) -> int:
        """Keys and values of `tokens` tokens in 16 bits, one layer."""
        return 2 * self.kv_heads * self.head_dim * tokens * HALF

    def sealed_bytes(self, fmt: TileFormat, tokens: int) -> int:
        """The cache of `tokens` tokens, one layer: sealed tiles with their flags, sink and last tile in 16 bits."""
        sealed = num_sealed(tokens - 1, fmt.tile_tokens)
        exact = self.exact_bytes(tokens - sealed * fmt.tile_tokens)
        return sealed * self.kv_heads * (fmt.tile_nbytes + 1) + exact


LLAMA = Model("Llama-3.1-8B, weights of 4 bits", 32, 32, 8, 128, 4.5e9, 6.98e9)


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def memory(model: Model, fmt: TileFormat) -> str:
    """Bytes of the whole cache at 16k and 64k tokens."""

    def rows() -> Iterator[list[str]]:
        for tokens in (16384, 65536):
            ours, theirs = model.layers * model.sealed_bytes(fmt, tokens), model.layers * model.exact_bytes(tokens)
            yield [str(tokens), f"{theirs / 1e6:.0f}", f"{ours / 1e6:.0f}", f"{theirs / ours:.1f}"]

    return table(["tokens", "fp16 MB", "ours MB", "times fewer"], rows())
