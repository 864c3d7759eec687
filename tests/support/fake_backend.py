"""A backend without tensors: slots and blocks hold token ids, and the next token is a hash of all that a span can read.

Any slot or block that the core hands out wrongly changes what comes out. `next_token` says what is right.
"""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from kvarn.backend import MemoryReport, ModelInfo, PoolSize, Record
from kvarn.format import Preset
from kvarn.model_plan import plan_model
from kvarn.step import Failure, SpanOutput, StepPlan, StepResult

VOCAB = 97
GARBAGE = -1


def next_token(tokens: Sequence[int]) -> int:
    """The token that follows a sequence."""
    digest = hashlib.sha256(b"".join(t.to_bytes(4, "little") for t in tokens)).digest()
    return int.from_bytes(digest[:4], "little") % VOCAB


def allowed_token(tokens: Sequence[int], allowed: bytes | None) -> int:
    """The token that follows a sequence: `next_token`, or the first one after it that a mask allows."""
    first = next_token(tokens)
    if allowed is None:
        return first
    order = [*range(first, VOCAB), *range(first)]
    return next(t for t in order if t // 8 < len(allowed) and allowed[t // 8] >> t % 8 & 1)


def fake_config(max_context: int = 4096) -> dict[str, int | str]:
    """config.json of the fake model."""
    return {
        "model_type": "fake",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 256,
        "head_dim": 64,
        "max_position_embeddings": max_context,
    }


class FakeBackend:
    """kvarn.backend.Backend over token ids. `poison` is a token whose tile cannot be sealed."""

    def __init__(
        self,
        preset: Preset | None,
        *,
        max_context: int = 4096,
        available: int = 1 << 40,
        poison: int | None = None,
        eos: tuple[int, ...] = (),
        vocab_size: int = VOCAB,
    ) -> None:
        plan = plan_model(fake_config(max_context), preset)
        self.info = ModelInfo(
            plan=plan, vocab_size=vocab_size, dtype="float32", device="fake", weight_bytes=1000, eos_token_ids=eos
        )
        g = plan.tile_tokens
        self.pool_size = PoolSize(block_bytes=g if preset else 0, slot_bytes=4 * g)
        self._available = available
        self._poison = poison
        self.plans: list[StepPlan] = []

    def share(self, preset: Preset | None) -> "FakeBackend":
        return FakeBackend(preset, max_context=self.info.plan.max_context, available=self._available)

    def available_bytes(self) -> int:
        return self._available

    def peak_bytes(self) -> int:
        return 0

    def allocate(self, num_blocks: int, num_slots: int) -> MemoryReport:
        g = self.info.plan.tile_tokens
        self.blocks = [[GARBAGE] * g for _ in range(num_blocks)]
        self.slots = [[GARBAGE] * g for _ in range(num_slots)]
        return MemoryReport(blocks=num_blocks * self.pool_size.block_bytes, slots=num_slots * self.pool_size.slot_bytes)

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        g, sealed = self.info.plan.tile_tokens, self.info.plan.preset is not None
        outputs, failures = [], []
        for index, span in enumerate(plan.spans):
            seal_into = list(span.seal_into)
            blocks = list(span.blocks)
            for position, token in enumerate(span.tokens, span.start):
                tile, at = divmod(position, g)
                slot = span.slots[min(tile, 1) if sealed else tile]
                self.slots[slot][at] = token
                if sealed and tile > 0 and at == g - 1:
                    block = seal_into.pop(0)
                    self.blocks[block] = list(self.slots[slot])
                    blocks.append(block)
                    if self._poison in self.blocks[block]:
                        failures.append(Failure(span=index, layer=1, kv_head=0, reason="poisoned"))
            assert not seal_into, "more blocks than tiles that this span completes"
            history = self._history(span.slots, blocks, span.stop)
            if span.sampling is not None:
                token = self.choose(history, span.sampling.allowed)
                outputs.append(SpanOutput(token=token, logprob=-1.0))
            elif span.want == "none":
                outputs.append(SpanOutput())
            else:
                count = len(span.tokens) if span.want == "all" else 1
                ends = range(span.stop - count + 1, span.stop + 1)
                rows = [np.eye(VOCAB, dtype=np.float32)[next_token(history[:end])] for end in ends]
                outputs.append(SpanOutput(logits=np.stack(rows)))
        return StepResult(outputs=tuple(outputs), failures=tuple(failures))

    def choose(self, history: Sequence[int], allowed: bytes | None) -> int:
        """The token that follows a sequence."""
        return allowed_token(history, allowed)

    def _history(self, slots: Sequence[int], blocks: Sequence[int], stop: int) -> list[int]:
        g = self.info.plan.tile_tokens
        if self.info.plan.preset is None:
            tiles = [self.slots[slot] for slot in slots]
        else:
            tiles = [self.slots[slots[0]], *(self.blocks[block] for block in blocks)]
            if len(tiles) * g < stop:
                tiles.append(self.slots[slots[1]])
        history = [token for tile in tiles for token in tile][:stop]
        assert len(history) == stop
        assert GARBAGE not in history, "a span reads what was never written"
        return history

    def export_block(self, block: int) -> Record:
        fmt, plan = self.info.plan.tile_format, self.info.plan
        assert fmt is not None
        tiles = np.zeros((len(plan.sealed), 2, fmt.tile_nbytes), np.uint8)
        tiles[0, 0, : fmt.tile_tokens] = self.blocks[block]
        return Record(dtype="float32", tiles=tiles, flags=np.zeros(tiles.shape[:2], np.uint8), exact={})

    def export_sink(self, slot: int) -> Record:
        plan = self.info.plan
        pages = {x.index: np.zeros((2, 2, plan.tile_tokens, 64 * 4), np.uint8) for x in plan.layers}
        pages[0][0, 0, :, 0] = self.slots[slot]
        return Record(dtype="float32", tiles=None, flags=None, exact=pages)

    def adopt_block(self, record: Record, block: int) -> None:
        record.check(info=self.info, sink=False)
        assert record.tiles is not None
        self.blocks[block] = record.tiles[0, 0, : self.info.plan.tile_tokens].tolist()

    def adopt_sink(self, record: Record, slot: int) -> None:
        record.check(info=self.info, sink=True)
        self.slots[slot] = record.exact[0][0, 0, :, 0].tolist()

    def copy_exact(self, source: int, target: int) -> None:
        self.slots[target] = list(self.slots[source])

    def route(self) -> Mapping[str, str]:
        return {"all": "fake"}
