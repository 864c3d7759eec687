"""Decode steps on CUDA as graphs: fixed buffers for a few numbers of rows, captured once, filled and replayed.

A step of B rows takes the smallest bucket that holds them; the rows beyond B are padding that writes a spare slot. The
same buffers and the same padding serve a direct run, so a replay gives its bits. Nothing in a bucket waits for the
device, allocates memory or reads the host: block tables and lengths lie in device memory. Sampling and the sealing of
full tiles follow outside, with the logits.

Every engine has buckets, graphs and a memory pool of its own.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvarn.backends.triton.dispatch import Operations
from kvarn.backends.triton.model import Attention, LoadedModel
from kvarn.backends.triton.pool import Pool
from kvarn.backends.triton.results import failures, outputs, seal_slots
from kvarn.model_plan import ModelPlan
from kvarn.step import Span, StepResult
from kvarn.visibility import num_sealed

if TYPE_CHECKING:  # it imports triton, which a machine without CUDA may lack
    from kvarn.backends.triton.kernels.rows import Row, Rows

_log = logging.getLogger("kvarn.triton")

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # numbers of rows; larger steps run directly

Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Records a run that depends on nothing but device memory: what replays it, and the output that a replay writes."""


def decode_row(span: Span, tile_tokens: int) -> "Row":
    """A span of one token as the kernels read it."""
    from kvarn.backends.triton.kernels.rows import Row

    return Row(
        token=span.tokens[0],
        position=span.start,
        sink=span.slots[0],
        tail=span.slots[min(span.start // tile_tokens, 1)],
        blocks=span.blocks[: num_sealed(span.start, tile_tokens)],
    )


def table_width(plan: ModelPlan) -> int:
    """Entries of a block table that serves the model's whole context."""
    return max(num_sealed(plan.max_context - 1, plan.tile_tokens), 1)


def capturer(device: str) -> Capture:
    """Captures CUDA graphs into one memory pool of their own, on the current device's private stream."""
    memory = torch.cuda.graph_pool_handle()

    def capture(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        with torch.cuda.device(device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):  # compiles, and lets libraries take their workspace
                    run()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
                output = run()
        return graph.replay, output

    return capture


class _Bucket:
    """A decode step of `rows.size` rows."""

    def __init__(self, decoder: "Decoder", rows: "Rows") -> None:
        self.rows = rows
        self._decoder = decoder
        self._replay: Callable[[], None] | None = None
        self._logits: Tensor | None = None

    def _run(self) -> Tensor:
        """Logits `[size, vocab]` of what the buffers hold."""
        d = self._decoder
        return d.model.forward_rows(self.rows.tokens, self.rows.positions, self._attend)

    def _attend(self, call: Attention) -> Tensor:
        pool, row = self._decoder.pool, self._decoder.pool.row[call.layer]
        pages, tiles, flags = pool.pages(call.layer), pool.tiles[row], pool.flags[row]
        return self.rows.attend(call.query, call.key, call.value, pages, tiles, flags, call.scale).to(call.query.dtype)

    def capture(self, capture: Capture) -> None:
        """Record the step; padding alone runs meanwhile."""
        self.rows.fill([])
        self._replay, self._logits = capture(self._run)

    def forget(self) -> None:
        """Run directly again."""
        self._replay = self._logits = None

    def __call__(self, rows: "Sequence[Row]") -> Tensor:
        """Logits `[size, vocab]`, a buffer that the next replay writes again."""
        self.rows.fill(rows)
        if self._replay is None or self._logits is None:
            return self._run()
        self._replay()
        return self._logits


class Decoder:
    """The decode steps of one engine; see `usable` for when there is one."""

    def __init__(
        self, model: LoadedModel, plan: ModelPlan, pool: Pool, operations: Operations, capture: Capture | None
    ) -> None:
        """Makes and, with `capture`, records every bucket that the pool has slots for."""
        from kvarn.backends.triton.kernels.rows import Rows

        fmt = plan.tile_format
        assert fmt is not None
        self.model, self.plan, self.pool, self.operations, self.format = model, plan, pool, operations, fmt
        self.graphs = "decode steps run directly, without CUDA graphs"
        sizes = [size for i, size in enumerate(BUCKETS) if i == 0 or BUCKETS[i - 1] < pool.spare]
        self._buckets: list[_Bucket] = []
        scratch = None
        for size in reversed(sizes):  # the largest makes the scratch memory of all
            rows = Rows(
                size,
                width=table_width(plan),
                spare=pool.spare,
                heads=plan.num_heads,
                kv_heads=plan.sealed[0].num_kv_heads,
                fmt=fmt,
                device=model.device,
                scratch=scratch,
            )
            scratch = rows.scratch
            self._buckets.insert(0, _Bucket(self, rows))
        if capture is not None:
            self._capture(capture)

    def _capture(self, capture: Capture) -> None:
        try:
            for bucket in self._buckets:
                bucket.capture(capture)
        except (RuntimeError, NotImplementedError) as error:  # a model that reads the host in its forward pass
            for bucket in self._buckets:
                bucket.forget()
            reason = f"this model cannot be captured: {str(error).splitlines()[0][:200]}"
            self.graphs = f"decode steps run directly, without CUDA graphs: {reason}"
            _say(reason)
        else:
            sizes = ", ".join(str(bucket.rows.size) for bucket in self._buckets)
            self.graphs = f"decode steps of up to {sizes} rows are CUDA graphs"
            _log.debug("kvarn: %s", self.graphs)

    def takes(self, spans: Sequence[Span]) -> bool:
        """Whether a step is decode alone, of no more rows than the largest bucket holds."""
        return len(spans) <= self._buckets[-1].rows.size and all(
            len(span.tokens) == 1 and span.num_logits == 1 for span in spans
        )

    def run(self, spans: Sequence[Span]) -> StepResult:
        """One step: append, attend in every layer, sample, seal what is full."""
        g = self.format.tile_tokens
        bucket = next(x for x in self._buckets if x.rows.size >= len(spans))
        logits = bucket([decode_row(span, g) for span in spans])[: len(spans)]
        sealing = [(i, span.slots[1], span.seal_into[0]) for i, span in enumerate(spans) if span.seal_into]
        status = seal_slots(self.pool, self.operations, self.format, sealing)
        rows = [slice(i, i + 1) for i in range(len(spans))]
        return StepResult(outputs=outputs(spans, rows, logits), failures=failures(status))


@functools.cache
def _say(reason: str) -> None:
    _log.warning("kvarn: decode steps run without CUDA graphs: %s", reason)


def usable(plan: ModelPlan, operations: Operations) -> str | None:
    """Why a model's decode steps cannot run over fixed buffers, if they cannot."""
    if not operations.triton:
        return "the Triton kernels do not run"
    if plan.exact:
        return f"{len(plan.exact)} layers are exact for good, and their steps have no fixed shape"
    return None
