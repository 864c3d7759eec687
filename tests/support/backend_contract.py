"""The contract of every backend on tiny models: no schedule changes an answer, records travel, failures stay alone.

A test file makes a class of BackendContract, gives it what differs between frameworks, and has fixtures: `llama_dir`, a
llama of two kv heads and head_dim 64, `mixed_dir`, a model of sliding and full layers, and `models`, both loaded.

LOGITS and CODES say how far two schedules may differ: a matrix product of another shape rounds otherwise, now and then
that moves a code, and a moved code moves what later queries read.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from small_models import Fed, Logits, distance, run, step

from kvarn import reference
from kvarn.backend import LoadOptions, Record
from kvarn.errors import BackendError, CapacityError, RecordError
from kvarn.format import Preset, SealStatus
from kvarn.step import Failure, SamplingRow, Span, StepPlan
from kvarn.tile import Bytes

G = 64
NARROW = Preset(key_bits=4, value_bits=2, tile_tokens=G)
WIDE = Preset(key_bits=8, value_bits=8, tile_tokens=G)
# Relative, over all logits of the prompt. A moved code of 8 bits gave 1.1e-4.
LOGITS = {NARROW: 2e-3, Preset(): 2e-3, WIDE: 3e-4, None: 1e-5}
# The share of bytes of sealed tiles. 6e-4 was seen, and 3e-3 with 8 bits, which have 16 times as many thresholds as 4.
CODES = {NARROW: 1e-3, Preset(): 1e-3, WIDE: 5e-3}
OPTIONS = LoadOptions(dtype="float32", device="cpu")
SIGNAL, BAD = 127, 7  # a dimension of the residual stream that only the bad token uses


def name(preset: Preset | None) -> str:
    return preset.name if preset else "exact"


def text(length: int, seed: int = 0) -> tuple[int, ...]:
    """Tokens without special ones, in the vocabulary of every model here."""
    return tuple(np.random.default_rng(seed).integers(4, 128, length).tolist())


def good_text(length: int) -> tuple[int, ...]:
    return tuple(8 if token == BAD else token for token in text(length))


def with_bad_token(tokens: tuple[int, ...], at: int) -> tuple[int, ...]:
    return (*tokens[:at], BAD, *tokens[at + 1 :])


def export(fed: Fed, count: int) -> tuple[Record, list[Record]]:
    """The sink and the first `count` blocks of a sequence."""
    backend = fed.backend
    return backend.export_sink(fed.slots[0]), [backend.export_block(fed.blocks[i]) for i in range(count)]


def assert_same_record(got: Record, want: Record) -> None:
    assert got.dtype == want.dtype
    assert got.exact.keys() == want.exact.keys()
    pairs = [(got.exact[i], want.exact[i]) for i in want.exact]
    for x, y in [*pairs, (got.tiles, want.tiles), (got.flags, want.flags)]:
        if x is None or y is None:
            assert x is None
            assert y is None
        else:
            assert x.dtype == y.dtype == np.uint8
            np.testing.assert_array_equal(x, y)


class Framework(ABC):
    """What differs between frameworks."""

    capacity_error: str  # of pools that do not fit
    routes: frozenset[str]  # what Backend.route names

    @abstractmethod
    def load(self, folder: Path, preset: Preset | None, options: LoadOptions) -> Any: ...

    def load_all(self, **folders: Path) -> dict[str, Any]:
        return {key: self.load(folder, NARROW, OPTIONS) for key, folder in folders.items()}

    @abstractmethod
    def poison(self, backend: Any) -> None:
        """NaN in every exact page, 0xFF (a NaN too) in every tile."""

    @abstractmethod
    def sealed(self, backend: Any) -> tuple[Bytes, Bytes]:
        """Tiles `[L, M, Hk, nbytes]` and flags `[L, M, Hk]` of the whole pool."""

    @abstractmethod
    def slot(self, backend: Any, layer: int, index: int) -> Logits:
        """A slot's keys and values of one layer, `[2, Hk, G, D]`."""

    @abstractmethod
    def exact_blocks(self, backend: Any, layer: int, count: int) -> Logits:
        """The first pages of a layer that is exact for good, `[count, 2, Hk, G, D]`."""

    @abstractmethod
    def pool_bytes(self, backend: Any) -> int:
        """What the pools' arrays take."""

    @abstractmethod
    def sample(self, logits: Logits, row: SamplingRow) -> Any:
        """The backend's sampling of one row from logits `[1, V]`."""

    @abstractmethod
    def sabotage(self, backend: Any, projection: str, row: int, weight: float) -> None:
        """Give layer 1 of a llama a huge key or value for the token BAD; it stays itself for all others.

        The dimension SIGNAL of the residual stream is 0 but for BAD, where the embedding puts 3, and layer 0 does not
        write it; row `row` of the projection's weight in layer 1 reads it with the weight.
        """

    def fresh(self, backend: Any, preset: Preset | None = NARROW, blocks: int = 20, slots: int = 20) -> Any:
        """Another backend over the same weights, its pools full of garbage."""
        other = backend.share(preset)
        other.allocate(blocks, slots)
        self.poison(other)
        return other

    def sealed_bytes(self, backend: Any, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """Tiles and flags of blocks, `[L, blocks, Hk, nbytes + 1]`."""
        tiles, flags = (x[:, list(blocks)] for x in self.sealed(backend))
        return np.concatenate([tiles, flags[..., None]], axis=-1)

    def assert_tiles_alike(self, one: Any, other: Any, count: int, preset: Preset) -> None:
        """The first blocks of both hold the same tiles, but for CODES; one may have chosen the other basis at a tie."""
        got, want = (self.sealed_bytes(x, range(count)) for x in (one, other))
        same_basis = got[..., -1] == want[..., -1]
        assert (~same_basis).sum() <= 1, f"{(~same_basis).sum()} of {same_basis.size} tiles have other flags"
        share = (got != want)[same_basis].mean()
        assert share < CODES[preset], f"{share:.2g} of the bytes differ"

    def sabotaged(self, folder: Path, projection: str, kv_head: int, weight: float) -> Any:
        """A llama whose layer 1 gives one kv head a huge key or value for the token BAD."""
        backend = self.load(folder, NARROW, OPTIONS)
        self.sabotage(backend, projection, 64 * kv_head + 5, weight)
        return self.fresh(backend)

    def assert_token_by_token_is_the_same(self, source: Any, preset: Preset | None) -> None:
        tokens = text(4 * G + 3)
        whole, single = self.fresh(source, preset), self.fresh(source, preset)
        assert distance(Fed(single, tokens).feed(1), Fed(whole, tokens).feed(1000)) < LOGITS[preset]
        if preset is not None:
            self.assert_tiles_alike(single, whole, 3, preset)

    def assert_spans_are_what_each_is_alone(self, source: Any, preset: Preset | None) -> None:
        """Decode beside prefill, a later chunk that completes tiles, and a sequence of one token."""
        backend = self.fresh(source, preset, 40, 60)
        wants, sequences = [], []
        for i, (begun, count) in enumerate([(200, 1), (0, 150), (100, 170), (0, 1), (64, 64), (127, 1)]):
            tokens = text(begun + count, seed=i)
            alone = Fed(self.fresh(source, preset), tokens)
            fed = Fed(backend, tokens, slots=range(10 * i, 10 * i + 10), blocks=range(6 * i, 6 * i + 6))
            if begun:
                np.testing.assert_array_equal(alone.run(begun), fed.run(begun))
            wants.append(alone.run(count))
            sequences.append(fed)
        got = run(backend, *(fed.span(1000) for fed in sequences))
        for i, want in enumerate(wants):
            assert distance(got[i], want) < LOGITS[preset], f"span {i}"

    def assert_logits_as_wanted(self, source: Any) -> None:
        """None, the last or all of them."""
        tokens = text(90)
        backend = self.fresh(source)
        want = Fed(backend, tokens).feed(90)
        wants = ("none", "last", "all", "none")
        outputs = step(backend, *(Fed(backend, tokens, first=2 * i).span(90, w) for i, w in enumerate(wants))).outputs
        vocab = backend.info.vocab_size
        shapes = [None if x.logits is None else x.logits.shape for x in outputs]
        assert shapes == [None, (1, vocab), (90, vocab), None]
        assert outputs[1].logits is not None
        assert outputs[2].logits is not None
        assert distance(outputs[1].logits, want[-1:]) < 1e-5
        assert distance(outputs[2].logits, want) < 1e-5
        assert all(x.token is None and x.logprob is None for x in outputs)

    def assert_sampled_from_the_last_logits(self, source: Any) -> None:
        """Greedy, random and unsampled spans in one step; tokens and log-probabilities as from the logits."""
        random = SamplingRow(temperature=1.5, top_k=20, uniform=0.83, logprobs=3)
        rows = [SamplingRow(), random, None, SamplingRow(temperature=1, uniform=0.2)]
        backend = self.fresh(source)
        spans = [Fed(backend, text(70 + i, seed=i), first=2 * i).span(100, "last", row) for i, row in enumerate(rows)]
        sampled = step(backend, *spans).outputs
        plain = run(backend, *(replace(span, sampling=None) for span in spans))
        for row, output, logits in zip(rows, sampled, plain, strict=True):
            if row is None:
                assert output.logits is not None
                np.testing.assert_array_equal(output.logits, logits)
                assert output.token is None
                continue
            want = self.sample(logits, row)
            assert output.logits is None
            assert output.token == want.token
            assert output.logprob == pytest.approx(want.logprob, rel=1e-4)
            assert [token for token, _ in output.top_logprobs] == [token for token, _ in want.top_logprobs]
        assert len(sampled[1].top_logprobs) == 3


class BackendContract(ABC):
    """The tests; `framework` says how."""

    framework: Framework

    @pytest.fixture
    def llama(self, models: dict[str, Any]) -> Any:
        return models["llama"]

    # --- schedules

    @pytest.mark.parametrize("preset", [NARROW, Preset(), WIDE, None], ids=name)
    def test_no_chunk_size_changes_an_answer(self, llama: Any, preset: Preset | None) -> None:
        tokens = text(1000)
        whole = self.framework.fresh(llama, preset)
        want = Fed(whole, tokens).feed(1000)
        assert want.shape == (1000, llama.info.vocab_size)
        for chunk in (64, 100, 128, 129, 500):
            backend = self.framework.fresh(llama, preset)
            error = distance(Fed(backend, tokens).feed(chunk), want)
            assert error < LOGITS[preset], f"chunks of {chunk}: {error:.2g}"
            if preset is not None:
                self.framework.assert_tiles_alike(backend, whole, 1000 // preset.tile_tokens - 1, preset)

    @pytest.mark.parametrize("preset", [NARROW, Preset(), WIDE, None], ids=name)
    @pytest.mark.parametrize("chunk", [1, 50, 64, 100, 129])
    def test_mixed_models_do_not_depend_on_chunks_either(
        self, models: dict[str, Any], preset: Preset | None, chunk: int
    ) -> None:
        tokens = text(420 if preset == Preset() else 330)
        whole, other = (self.framework.fresh(models["mixed"], preset) for _ in range(2))
        layers = whole.info.plan.layers
        assert {layer.kind for layer in layers} == ({"exact"} if preset is None else {"exact", "sealed"})
        want = Fed(whole, tokens).feed(len(tokens))
        assert distance(Fed(other, tokens).feed(chunk), want) < LOGITS[preset]
        if preset is not None:
            sealed = len(tokens) // preset.tile_tokens - 1
            self.framework.assert_tiles_alike(other, whole, sealed, preset)
            for layer in whole.info.plan.exact:
                got, wanted = (self.framework.exact_blocks(x, layer.index, sealed) for x in (other, whole))
                np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-2)

    @pytest.mark.parametrize("preset", [NARROW, WIDE, None], ids=name)
    def test_token_by_token_is_the_same_as_at_once(self, llama: Any, preset: Preset | None) -> None:
        self.framework.assert_token_by_token_is_the_same(llama, preset)

    def test_tiles_are_sealed_from_the_exact_keys_of_their_own_layer(self, llama: Any) -> None:
        """What `exact` keeps, sealed by the oracle, is what the blocks of the first layer hold.

        The deeper layers of the two read other values, since one reads sealed tiles.
        """
        tokens = text(3 * G)
        exact, backend = self.framework.fresh(llama, None), self.framework.fresh(llama)
        Fed(exact, tokens).feed(100)
        Fed(backend, tokens).feed(100)
        fmt = backend.info.plan.tile_format
        kept = np.concatenate([self.framework.slot(exact, 0, slot) for slot in (0, 1)], axis=2)  # [2, Hk, T, D]
        tiles, flags = self.framework.sealed(backend)
        for tile, head in ((1, 0), (1, 1), (2, 0), (2, 1)):
            keys, values = np.ascontiguousarray(kept[:, head, tile * G : (tile + 1) * G])
            want, flag = reference.seal(keys, values, fmt)
            np.testing.assert_array_equal(tiles[0, tile - 1, head], want)
            assert flags[0, tile - 1, head] == flag

    @pytest.mark.parametrize("preset", [NARROW, None], ids=name)
    def test_any_blocks_and_slots_serve(self, llama: Any, preset: Preset | None) -> None:
        tokens = text(400)
        want = Fed(self.framework.fresh(llama, preset), tokens).feed(100)
        order = np.random.default_rng(5).permutation(20).tolist()
        got = Fed(self.framework.fresh(llama, preset), tokens, slots=order, blocks=order[::-1]).feed(100)
        np.testing.assert_array_equal(got, want)

    @pytest.mark.parametrize("preset", [NARROW, None], ids=name)
    def test_recycled_blocks_and_slots_hold_nothing_of_their_last_owner(
        self, llama: Any, preset: Preset | None
    ) -> None:
        tokens = text(300)
        want = Fed(self.framework.fresh(llama, preset), tokens).feed(70)
        backend = self.framework.fresh(llama, preset)
        Fed(backend, text(390, seed=1)).feed(70)
        for _ in range(2):
            np.testing.assert_array_equal(Fed(backend, tokens).feed(70), want)

    @pytest.mark.parametrize("preset", [NARROW, None], ids=name)
    @pytest.mark.parametrize("model", ["llama", "mixed"])
    def test_spans_in_one_step_are_what_each_is_alone(
        self, models: dict[str, Any], model: str, preset: Preset | None
    ) -> None:
        self.framework.assert_spans_are_what_each_is_alone(models[model], preset)

    def test_another_thread_may_run_the_steps(self, llama: Any) -> None:
        """The engine loads on one thread and runs on its own."""
        tokens = text(200)
        want = Fed(self.framework.fresh(llama), tokens).feed(100)
        backend, got = self.framework.fresh(llama), []
        thread = threading.Thread(target=lambda: got.append(Fed(backend, tokens).feed(100)))
        thread.start()
        thread.join()
        np.testing.assert_array_equal(got[0], want)

    # --- what a span asks for

    def test_a_span_gets_none_the_last_or_all_logits(self, llama: Any) -> None:
        self.framework.assert_logits_as_wanted(llama)

    def test_a_step_that_wants_no_logits_runs_all_the_same(self, llama: Any) -> None:
        tokens = text(3 * G + 5)
        want = Fed(self.framework.fresh(llama), tokens).feed(100)
        fed = Fed(self.framework.fresh(llama), tokens)
        assert run(fed.backend, fed.span(100, "none")) == []
        np.testing.assert_array_equal(fed.run(1000), want[100:])

    def test_tokens_are_sampled_from_the_last_logits(self, llama: Any) -> None:
        self.framework.assert_sampled_from_the_last_logits(llama)

    # --- records

    @pytest.mark.parametrize("model", ["llama", "mixed"])
    def test_records_carry_a_prefix_into_another_backend(
        self, models: dict[str, Any], model: str, llama_dir: Path, mixed_dir: Path
    ) -> None:
        tokens = text(5 * G + 30)
        source = Fed(self.framework.fresh(models[model]), tokens)
        source.run(5 * G)
        sink, blocks = export(source, 4)
        want = np.concatenate([source.run(20), source.run(1), source.run(9)])

        target = self.framework.load({"llama": llama_dir, "mixed": mixed_dir}[model], NARROW, OPTIONS)
        target.allocate(9, 4)
        self.framework.poison(target)
        target.adopt_sink(sink, 3)
        for record, block in zip(blocks, (8, 0, 5, 2), strict=True):
            target.adopt_block(record, block)
        fed = Fed(target, tokens, slots=(3, 1), blocks=(8, 0, 5, 2, 4), at=5 * G)
        np.testing.assert_array_equal(np.concatenate([fed.run(20), fed.run(1), fed.run(9)]), want)

    @pytest.mark.parametrize("preset", [NARROW, WIDE], ids=name)
    @pytest.mark.parametrize("model", ["llama", "mixed"])
    def test_a_record_has_the_shapes_of_its_plan_and_survives_adoption(
        self, models: dict[str, Any], model: str, preset: Preset
    ) -> None:
        fed = Fed(self.framework.fresh(models[model], preset), text(200))
        fed.feed(200)
        sink, (block,) = export(fed, 1)
        sink.check(info=fed.backend.info, sink=True)
        block.check(info=fed.backend.info, sink=False)
        plan = fed.backend.info.plan
        assert sink.exact.keys() == {layer.index for layer in plan.layers}
        assert block.exact.keys() == {layer.index for layer in plan.exact}
        assert bool(plan.exact) == (model == "mixed")
        fed.backend.adopt_sink(sink, 7)
        fed.backend.adopt_block(block, 7)
        assert_same_record(fed.backend.export_sink(7), sink)
        assert_same_record(fed.backend.export_block(7), block)

    def test_under_exact_every_slot_is_a_sink_and_travels(self, llama: Any) -> None:
        tokens, g = text(600), Preset().tile_tokens
        source = Fed(self.framework.fresh(llama, None), tokens)
        assert source.backend.info.plan.tile_tokens == g
        target = Fed(self.framework.fresh(llama, None), tokens, slots=(9, 4, 7, 1, 3), at=4 * g)
        source.run(4 * g)
        for i in range(4):
            target.backend.adopt_sink(source.backend.export_sink(i), target.slots[i])
        np.testing.assert_array_equal(target.feed(50), source.feed(50))

    def test_an_export_is_a_copy(self, llama: Any) -> None:
        fed = Fed(self.framework.fresh(llama), text(200))
        fed.feed(200)
        (sink, (block,)), again = export(fed, 1), export(fed, 1)
        Fed(fed.backend, text(200, seed=9)).feed(200)
        assert_same_record(sink, again[0])
        assert_same_record(block, again[1][0])
        changed = fed.backend.export_block(0)
        assert block.tiles is not None
        assert changed.tiles is not None
        assert not np.array_equal(changed.tiles, block.tiles)

    @pytest.mark.parametrize("model", ["llama", "mixed"])
    def test_a_record_of_another_shape_or_dtype_is_refused_and_changes_nothing(
        self, models: dict[str, Any], model: str
    ) -> None:
        backend = self.framework.fresh(models[model])
        fed = Fed(backend, text(200))
        fed.feed(200)
        sink, (block,) = export(fed, 1)
        tiles, flags, count = block.tiles, block.flags, len(backend.info.plan.layers)
        assert tiles is not None
        assert flags is not None
        bad_blocks = [
            sink,
            replace(block, dtype="bfloat16"),
            replace(block, tiles=None),
            replace(block, flags=None),
            replace(block, tiles=tiles[:, :, :-1]),
            replace(block, tiles=tiles[:, :1], flags=flags[:, :1]),
            replace(block, flags=flags[:, :1]),
            replace(block, tiles=np.concatenate([tiles, tiles]), flags=np.concatenate([flags, flags])),
            replace(block, tiles=tiles.astype(np.float32) + 256),
            replace(block, flags=flags.astype(np.float32) + 256),
            replace(block, exact={**block.exact, 1: sink.exact[1]}),
        ]
        # A record without one of its exact layers, and without any.
        bad_blocks += [replace(block, exact={j: x for j, x in block.exact.items() if j != i}) for i in block.exact]
        bad_blocks += [replace(block, exact={})] if model == "mixed" else []
        bad_sinks = [
            block,
            replace(sink, dtype="float16"),
            replace(sink, tiles=tiles, flags=flags),
            replace(sink, exact={}),
            replace(sink, exact={i: x for i, x in sink.exact.items() if i != count - 1}),
            replace(sink, exact={**sink.exact, count: sink.exact[0]}),
            replace(sink, exact={**sink.exact, 1: sink.exact[1][:, :, :, :-4]}),
            replace(sink, exact={**sink.exact, 1: sink.exact[1][:, :1]}),
            replace(sink, exact={**sink.exact, 1: np.concatenate([sink.exact[1]] * 2, axis=2)}),
        ]
        for record in bad_blocks:
            with pytest.raises(RecordError):
                backend.adopt_block(record, 0)
        for record in bad_sinks:
            with pytest.raises(RecordError):
                backend.adopt_sink(record, 0)
        assert_same_record(backend.export_sink(0), sink)
        assert_same_record(backend.export_block(0), block)

    def test_a_record_of_another_preset_or_model_is_refused(self, models: dict[str, Any]) -> None:
        source = Fed(self.framework.fresh(models["llama"], WIDE), text(200))
        source.feed(200)
        sink, (block,) = export(source, 1)
        for other in (self.framework.fresh(models["llama"]), self.framework.fresh(models["mixed"], WIDE)):
            with pytest.raises(RecordError):
                other.adopt_block(block, 0)
        with pytest.raises(RecordError):
            self.framework.fresh(models["llama"], Preset()).adopt_sink(sink, 0)

    def test_bfloat16_records_travel_by_the_bit(self, llama: Any, llama_dir: Path) -> None:
        made = self.framework.load(llama_dir, NARROW, LoadOptions(dtype="bfloat16", device="cpu"))
        fed = Fed(self.framework.fresh(made), text(3 * G + 9))
        fed.run(3 * G)
        sink, blocks = export(fed, 2)
        assert sink.dtype == "bfloat16"
        assert sink.exact[0].shape == (2, 2, G, 128)
        other = Fed(self.framework.fresh(made), fed.tokens, at=3 * G)
        other.backend.adopt_sink(sink, 0)
        for i, block in enumerate(blocks):
            other.backend.adopt_block(block, i)
        assert_same_record(other.backend.export_sink(0), sink)
        np.testing.assert_array_equal(other.run(9), fed.run(9))
        with pytest.raises(RecordError):
            self.framework.fresh(llama).adopt_sink(sink, 0)

    @pytest.mark.parametrize("model", ["llama", "mixed"])
    def test_a_fork_goes_its_own_way_from_a_copied_tail(self, models: dict[str, Any], model: str) -> None:
        """Two sequences share the sink and a block; each has its own tail, and seals its own next block."""
        source = models[model]
        common, left, right = text(3 * G - 20), text(40, seed=1), text(40, seed=2)
        wants = []
        for answer in (left, right):
            fed = Fed(self.framework.fresh(source), common + answer)
            fed.run(len(common))
            wants.append(fed.feed(30))
        backend = self.framework.fresh(source)
        parent = Fed(backend, common + left, slots=(0, 1), blocks=(0, 1))
        parent.run(len(common))
        backend.copy_exact(1, 2)
        child = Fed(backend, common + right, slots=(0, 2), blocks=(0, 3), at=len(common))
        got = [parent.run(30), child.run(30), parent.run(10), child.run(10)]
        np.testing.assert_array_equal(np.concatenate(got[0::2]), wants[0])
        np.testing.assert_array_equal(np.concatenate(got[1::2]), wants[1])

    # --- failures

    @pytest.mark.parametrize(
        ("projection", "weight", "status"),
        [
            ("k_proj", 1e9, SealStatus.KEYS_OVERFLOW),
            ("v_proj", 1e9, SealStatus.VALUES_OVERFLOW),
            ("k_proj", 3e38, SealStatus.NON_FINITE),
            ("v_proj", 3e38, SealStatus.NON_FINITE),
        ],
    )
    @pytest.mark.parametrize("kv_head", [0, 1])
    def test_a_tile_that_cannot_be_sealed_fails_its_own_span_by_layer_and_head(
        self, llama_dir: Path, projection: str, kv_head: int, weight: float, status: SealStatus
    ) -> None:
        backend = self.framework.sabotaged(llama_dir, projection, kv_head, weight)
        good = good_text(3 * G)
        bad = with_bad_token(good, G + 9)  # in tile 1
        spans = [Fed(backend, tokens, first=2 * i).span(1000) for i, tokens in enumerate((good, bad, good))]
        clean = run(backend, *(replace(span, tokens=good) for span in spans))
        kept = self.framework.sealed_bytes(backend, (0, 1, 4, 5))
        result = backend.run(StepPlan(spans=tuple(spans)))
        assert result.failures[0] == Failure(span=1, layer=1, kv_head=kv_head, reason=status.reason)
        assert {failure.span for failure in result.failures} == {1}
        for i in (0, 2):
            np.testing.assert_array_equal(result.outputs[i].logits, clean[i])
        np.testing.assert_array_equal(self.framework.sealed_bytes(backend, (0, 1, 4, 5)), kept)
        again = run(backend, *(replace(span, tokens=good) for span in spans))
        np.testing.assert_array_equal(again[1], clean[1])

    @pytest.mark.parametrize("where", [3, G - 1, 2 * G + 1])
    def test_a_bad_token_outside_of_sealed_tiles_is_no_failure(self, llama_dir: Path, where: int) -> None:
        """The sink and the tail are exact, so nothing needs a constant there; a value of 1e5 is only large."""
        backend = self.framework.sabotaged(llama_dir, "v_proj", 0, 1e5)
        run(backend, Fed(backend, with_bad_token(good_text(2 * G + 5), where)).span(1000))

    # --- the rest of the contract

    @pytest.mark.parametrize("preset", [NARROW, Preset(), None], ids=name)
    @pytest.mark.parametrize("model", ["llama", "mixed"])
    def test_the_memory_report_is_what_the_arrays_take_and_what_was_predicted(
        self, models: dict[str, Any], model: str, preset: Preset | None
    ) -> None:
        backend = models[model].share(preset)
        blocks = 0 if preset is None else 7
        report = backend.allocate(blocks, 3)
        assert report.blocks == blocks * backend.pool_size.block_bytes
        assert report.slots == 3 * backend.pool_size.slot_bytes
        assert backend.pool_size.slot_bytes == backend.info.exact_bytes_per_token * backend.info.plan.tile_tokens
        assert report.blocks + report.slots == self.framework.pool_bytes(backend)
        Fed(backend, text(200)).feed(100)
        assert report.blocks + report.slots == self.framework.pool_bytes(backend)

    def test_nothing_runs_before_the_pools_are_there(self, llama: Any) -> None:
        backend = llama.share(NARROW)
        for call in (
            lambda: step(backend, Span(tokens=(5,), start=0, slots=(0,))),
            lambda: backend.export_sink(0),
            lambda: backend.copy_exact(0, 1),
        ):
            with pytest.raises(BackendError, match="call allocate first"):
                call()

    def test_pools_that_do_not_fit_are_a_capacity_error(self, llama: Any) -> None:
        with pytest.raises(CapacityError, match=self.framework.capacity_error):
            llama.share(NARROW).allocate(10**12, 1)

    def test_sharing_shares_weights_and_nothing_else(self, llama: Any) -> None:
        first, second = self.framework.fresh(llama), self.framework.fresh(llama, None)
        assert first.model is second.model
        assert (first.info.plan.name, second.info.plan.name) == (NARROW.name, "exact")
        tokens = text(200)
        want = Fed(first, tokens).feed(64)
        again, other = Fed(self.framework.fresh(llama), tokens), Fed(second, text(200, seed=3))
        got = []
        for _ in range(4):
            got.append(again.run(64))
            other.run(50)
        np.testing.assert_array_equal(np.concatenate(got), want)

    def test_the_backend_says_what_it_loaded(self, llama: Any) -> None:
        info = llama.info
        assert (info.dtype, info.device) == ("float32", "cpu")
        assert info.exact_bytes_per_token == len(info.plan.layers) * 2 * 2 * 64 * 4
        assert llama.available_bytes() > 0
        assert llama.peak_bytes() > info.weight_bytes > 0
        assert set(llama.route()) == self.framework.routes
        of_tiles = {"seal", "unseal", "attend"}
        assert set(llama.share(None).route()) == self.framework.routes - of_tiles
