"""The torch backend's contract on tiny models: no schedule changes an answer, records travel, failures stay alone.

LOGITS and CODES say how far two schedules may differ: a matrix product of another shape rounds otherwise, now and then
that moves a code, and a moved code moves what later queries read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from kvarn import reference
from kvarn.backend import LoadOptions, Record
from kvarn.backends.triton import backend as torch_backend
from kvarn.backends.triton.backend import TorchBackend
from kvarn.backends.triton.sampling import sample
from kvarn.errors import BackendError, CapacityError, RecordError
from kvarn.format import Preset, SealStatus
from kvarn.step import Failure, SamplingRow, Span, StepPlan, StepResult, Want
from kvarn.visibility import completed_tiles

G = 64
NARROW = Preset(key_bits=4, value_bits=2, tile_tokens=G)
WIDE = Preset(key_bits=8, value_bits=8, tile_tokens=G)
LOGITS = {NARROW: 2e-3, Preset(): 2e-3, WIDE: 1e-4, None: 1e-5}  # relative, over all logits of the prompt
CODES = 1e-3  # the share of bytes of sealed tiles; 6e-4 was seen
Logits = NDArray[np.float32]

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
MIXED: dict[str, Any] = {
    "sliding_window": 100,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


def save(folder: Path, model_type: str, **changes: Any) -> Path:
    """A model with random weights from a fixed seed."""
    transformers_logging.disable_progress_bar()
    torch.manual_seed(1)
    config = CONFIG_MAPPING[model_type](**SMALL, **changes)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.02) if p.ndim < 2 else p.normal_(0, p.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session")
def mixed_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sliding layers around a full one."""
    return save(tmp_path_factory.mktemp("mixed"), "gemma3_text", **MIXED)


@pytest.fixture(scope="session")
def llama(llama_dir: Path) -> TorchBackend:
    return load(llama_dir, NARROW)


@pytest.fixture(scope="session")
def mixed(mixed_dir: Path) -> TorchBackend:
    return load(mixed_dir, NARROW)


def load(folder: Path, preset: Preset | None) -> TorchBackend:
    return torch_backend.load(folder, preset, LoadOptions(dtype="float32", device="cpu"))


def fresh(backend: TorchBackend, preset: Preset | None = NARROW, blocks: int = 20, slots: int = 20) -> TorchBackend:
    """Another backend over the same weights, its pools full of garbage."""
    other = backend.share(preset)
    other.allocate(blocks, slots)
    poison(other)
    return other


def poison(backend: TorchBackend) -> None:
    """NaN in every exact page, 0xFF (a NaN too) in every tile."""
    pool = backend.pool
    pages = [*pool.exact_slots.values(), *pool.exact_blocks.values()]
    if pool.row:
        pool.tiles.fill_(0xFF)
        pool.flags.fill_(0xFF)
        pages.append(pool.slots)
    for page in pages:
        page.fill_(torch.nan)


def text(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(4, 128, length).tolist())


@dataclass
class Fed:
    """One sequence on its way through a backend, with the slots and blocks that it owns."""

    backend: TorchBackend
    tokens: tuple[int, ...]
    slots: Sequence[int] = tuple(range(20))
    blocks: Sequence[int] = tuple(range(20))
    at: int = 0

    def span(self, count: int, want: Want = "all", sampling: SamplingRow | None = None) -> Span:
        """The next `count` tokens."""
        plan = self.backend.info.plan
        start, stop = self.at, min(self.at + count, len(self.tokens))
        self.at, g = stop, plan.tile_tokens
        last = (stop - 1) // g
        before, new = len(completed_tiles(0, start, g)), len(completed_tiles(start, stop, g))
        sealed = plan.preset is not None
        return Span(
            tokens=self.tokens[start:stop],
            start=start,
            slots=tuple(self.slots[: (min(last, 1) if sealed else last) + 1]),
            blocks=tuple(self.blocks[:before]) if sealed else (),
            seal_into=tuple(self.blocks[before : before + new]) if sealed else (),
            want=want,
            sampling=sampling,
        )

    def run(self, count: int) -> Logits:
        """Run the next tokens alone; all their logits."""
        return one(step(self.backend, self.span(count)))

    def feed(self, chunk: int) -> Logits:
        """Run all that is left in chunks."""
        return np.concatenate([self.run(chunk) for _ in range(self.at, len(self.tokens), chunk)])


def step(backend: TorchBackend, *spans: Span) -> StepResult:
    return backend.run(StepPlan(spans=spans))


def one(result: StepResult, index: int = 0) -> Logits:
    """The logits of one span of a step without failures."""
    assert result.failures == ()
    logits = result.outputs[index].logits
    assert logits is not None
    assert np.isfinite(logits).all(), "garbage was read"
    return logits


def distance(got: Logits, want: Logits) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def sealed_bytes(backend: TorchBackend, blocks: Sequence[int]) -> NDArray[np.uint8]:
    """Tiles and flags of blocks, `[L, blocks, Hk, nbytes + 1]`."""
    tiles, flags = backend.pool.tiles[:, list(blocks)], backend.pool.flags[:, list(blocks)]
    return torch.cat([tiles, flags[..., None]], dim=-1).numpy()


# --- schedules


@pytest.mark.parametrize("preset", [NARROW, Preset(), WIDE, None], ids=lambda p: p.name if p else "exact")
def test_no_chunk_size_changes_an_answer(llama: TorchBackend, preset: Preset | None) -> None:
    tokens = text(1000)
    whole = fresh(llama, preset)
    want = Fed(whole, tokens).feed(1000)
    assert want.shape == (1000, 128)
    for chunk in (64, 100, 128, 129, 500):
        backend = fresh(llama, preset)
        error = distance(Fed(backend, tokens).feed(chunk), want)
        assert error < LOGITS[preset], f"chunks of {chunk}: {error:.2g}"
        if preset is not None:
            sealed = range(1000 // preset.tile_tokens - 1)
            differ = sealed_bytes(backend, sealed) != sealed_bytes(whole, sealed)
            assert differ.mean() < CODES, f"chunks of {chunk}: {differ.mean():.2g}"


@pytest.mark.parametrize("preset", [NARROW, WIDE, None], ids=lambda p: p.name if p else "exact")
def test_token_by_token_is_the_same_as_at_once(llama: TorchBackend, preset: Preset | None) -> None:
    tokens = text(4 * G + 3)
    whole, single = fresh(llama, preset), fresh(llama, preset)
    error = distance(Fed(single, tokens).feed(1), Fed(whole, tokens).feed(1000))
    assert error < LOGITS[preset]
    if preset is not None:
        assert (sealed_bytes(single, range(3)) != sealed_bytes(whole, range(3))).mean() < CODES


@pytest.mark.parametrize("preset", [NARROW, WIDE, None], ids=lambda p: p.name if p else "exact")
@pytest.mark.parametrize("chunk", [1, 50, 64, 100, 129])
def test_mixed_models_do_not_depend_on_chunks_either(mixed: TorchBackend, preset: Preset | None, chunk: int) -> None:
    tokens = text(330)
    whole, other = fresh(mixed, preset), fresh(mixed, preset)
    assert [layer.kind for layer in whole.info.plan.layers] == ["exact", "sealed" if preset else "exact", "exact"]
    want = Fed(whole, tokens).feed(330)
    assert distance(Fed(other, tokens).feed(chunk), want) < LOGITS[preset]
    if preset is not None:
        assert (sealed_bytes(other, range(4)) != sealed_bytes(whole, range(4))).mean() < CODES
        for index, pages in whole.pool.exact_blocks.items():
            torch.testing.assert_close(other.pool.exact_blocks[index][:4], pages[:4], rtol=0, atol=1e-2)


def test_tiles_are_sealed_from_the_exact_keys_of_their_own_layer(llama: TorchBackend) -> None:
    """What `exact` keeps, sealed by the oracle, is what the blocks of the first layer hold.

    The deeper layers of the two read other values, since one reads sealed tiles.
    """
    tokens = text(3 * G)
    exact, backend = fresh(llama, None), fresh(llama)
    Fed(exact, tokens).feed(100)
    Fed(backend, tokens).feed(100)
    fmt = backend.info.plan.tile_format
    assert fmt is not None
    kept = torch.cat([exact.pool.slot(0, slot) for slot in (0, 1)], dim=2).numpy()  # [2, Hk, T, D]
    for tile, head in ((1, 0), (1, 1), (2, 0), (2, 1)):
        keys, values = np.ascontiguousarray(kept[:, head, tile * G : (tile + 1) * G])
        want, flag = reference.seal(keys, values, fmt)
        np.testing.assert_array_equal(backend.pool.tiles[0, tile - 1, head].numpy(), want)
        assert int(backend.pool.flags[0, tile - 1, head]) == flag


@pytest.mark.parametrize("preset", [NARROW, None], ids=lambda p: p.name if p else "exact")
def test_any_blocks_and_slots_serve(llama: TorchBackend, preset: Preset | None) -> None:
    tokens = text(400)
    want = Fed(fresh(llama, preset), tokens).feed(100)
    order = np.random.default_rng(5).permutation(20).tolist()
    got = Fed(fresh(llama, preset), tokens, slots=order, blocks=order[::-1]).feed(100)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("preset", [NARROW, None], ids=lambda p: p.name if p else "exact")
def test_recycled_blocks_and_slots_hold_nothing_of_their_last_owner(llama: TorchBackend, preset: Preset | None) -> None:
    tokens = text(300)
    want = Fed(fresh(llama, preset), tokens).feed(70)
    backend = fresh(llama, preset)
    Fed(backend, text(390, seed=1)).feed(70)
    for _ in range(2):
        np.testing.assert_array_equal(Fed(backend, tokens).feed(70), want)


@pytest.mark.parametrize("preset", [NARROW, None], ids=lambda p: p.name if p else "exact")
@pytest.mark.parametrize("model", ["llama", "mixed"])
def test_spans_in_one_step_are_what_each_is_alone(
    model: str, preset: Preset | None, llama: TorchBackend, mixed: TorchBackend
) -> None:
    """Decode beside prefill, a later chunk that completes tiles, and a sequence of one token."""
    source = {"llama": llama, "mixed": mixed}[model]
    lengths = [(200, 1), (0, 150), (100, 170), (0, 1), (64, 64), (127, 1)]
    backend = fresh(source, preset, 40, 60)
    wants, sequences = [], []
    for i, (begun, count) in enumerate(lengths):
        tokens = text(begun + count, seed=i)
        alone = Fed(fresh(source, preset), tokens)
        mine = range(10 * i, 10 * i + 10)
        fed = Fed(backend, tokens, slots=mine, blocks=range(6 * i, 6 * i + 6))
        if begun:
            np.testing.assert_array_equal(alone.run(begun), fed.run(begun))
        wants.append(alone.run(count))
        sequences.append(fed)
    result = step(backend, *(fed.span(1000) for fed in sequences))
    for i, want in enumerate(wants):
        assert distance(one(result, i), want) < LOGITS[preset], f"span {i}"


# --- what a span asks for


def test_a_span_gets_none_the_last_or_all_logits(llama: TorchBackend) -> None:
    tokens = text(90)
    backend = fresh(llama)
    want = Fed(backend, tokens).feed(90)
    wants: tuple[Want, ...] = ("none", "last", "all", "none")
    spans = [Fed(backend, tokens, slots=(2 * i, 2 * i + 1), blocks=(i,)).span(90, w) for i, w in enumerate(wants)]
    result = step(backend, *spans)
    assert [None if x.logits is None else x.logits.shape for x in result.outputs] == [None, (1, 128), (90, 128), None]
    assert distance(one(result, 1), want[-1:]) < 1e-5
    assert distance(one(result, 2), want) < 1e-5
    assert all(x.token is None and x.logprob is None for x in result.outputs)


def test_a_step_that_wants_no_logits_runs_all_the_same(llama: TorchBackend) -> None:
    tokens = text(3 * G + 5)
    want = Fed(fresh(llama), tokens).feed(100)
    fed = Fed(fresh(llama), tokens)
    result = step(fed.backend, fed.span(100, "none"))
    assert result.outputs[0].logits is None
    np.testing.assert_array_equal(fed.run(1000), want[100:])


def test_tokens_are_sampled_from_the_last_logits(llama: TorchBackend) -> None:
    """Greedy, random and unsampled spans in one step; tokens and log-probabilities as from the logits themselves."""
    rows = [
        SamplingRow(),
        SamplingRow(temperature=1.5, top_k=20, uniform=0.83, logprobs=3),
        None,
        SamplingRow(temperature=1, uniform=0.2),
    ]
    backend = fresh(llama)
    spans = [
        Fed(backend, text(70 + i, seed=i), slots=(2 * i, 2 * i + 1), blocks=(i,)).span(100, "last", row)
        for i, row in enumerate(rows)
    ]
    sampled = step(backend, *spans)
    plain = step(backend, *(replace(span, sampling=None) for span in spans))
    for i, row in enumerate(rows):
        output = sampled.outputs[i]
        if row is None:
            np.testing.assert_array_equal(one(sampled, i), one(plain, i))
            assert output.token is None
            continue
        want = sample(torch.from_numpy(one(plain, i)), [row])[0]
        assert output.logits is None
        assert output.token == want.token
        assert output.logprob == pytest.approx(want.logprob, rel=1e-4)
        assert [token for token, _ in output.top_logprobs] == [token for token, _ in want.top_logprobs]
    assert len(sampled.outputs[1].top_logprobs) == 3


# --- records


def export(fed: Fed, count: int) -> tuple[Record, list[Record]]:
    """The sink and the first `count` blocks of a sequence."""
    backend = fed.backend
    return backend.export_sink(fed.slots[0]), [backend.export_block(fed.blocks[i]) for i in range(count)]


@pytest.mark.parametrize("model", ["llama", "mixed"])
def test_records_carry_a_prefix_into_another_backend(
    model: str, llama: TorchBackend, mixed: TorchBackend, llama_dir: Path, mixed_dir: Path
) -> None:
    tokens = text(5 * G + 30)
    source = Fed(fresh({"llama": llama, "mixed": mixed}[model]), tokens)
    source.run(5 * G)
    sink, blocks = export(source, 4)
    want = np.concatenate([source.run(20), source.run(1), source.run(9)])

    target = load({"llama": llama_dir, "mixed": mixed_dir}[model], NARROW)
    target.allocate(9, 4)
    poison(target)
    target.adopt_sink(sink, 3)
    for record, block in zip(blocks, (8, 0, 5, 2), strict=True):
        target.adopt_block(record, block)
    fed = Fed(target, tokens, slots=(3, 1), blocks=(8, 0, 5, 2, 4), at=5 * G)
    np.testing.assert_array_equal(np.concatenate([fed.run(20), fed.run(1), fed.run(9)]), want)


@pytest.mark.parametrize("preset", [NARROW, WIDE])
@pytest.mark.parametrize("model", ["llama", "mixed"])
def test_a_record_has_the_shapes_of_its_plan_and_survives_adoption(
    model: str, preset: Preset, llama: TorchBackend, mixed: TorchBackend
) -> None:
    fed = Fed(fresh({"llama": llama, "mixed": mixed}[model], preset), text(200))
    fed.feed(200)
    sink, (block,) = export(fed, 1)
    sink.check(info=fed.backend.info, sink=True)
    block.check(info=fed.backend.info, sink=False)
    assert sink.exact.keys() == {0, 1, 2}
    assert block.exact.keys() == ({0, 2} if model == "mixed" else set())
    fed.backend.adopt_sink(sink, 7)
    fed.backend.adopt_block(block, 7)
    assert_same_record(fed.backend.export_sink(7), sink)
    assert_same_record(fed.backend.export_block(7), block)


def test_under_exact_every_slot_is_a_sink_and_travels(llama: TorchBackend) -> None:
    tokens = text(300)
    source, target = Fed(fresh(llama, None), tokens), Fed(fresh(llama, None), tokens, slots=(9, 4, 7, 1, 3), at=4 * G)
    source.run(4 * G)
    for i in range(4):
        target.backend.adopt_sink(source.backend.export_sink(i), target.slots[i])
    np.testing.assert_array_equal(target.run(100), source.run(100))


def test_an_export_is_a_copy(llama: TorchBackend) -> None:
    fed = Fed(fresh(llama), text(200))
    fed.feed(200)
    (sink, (block,)), again = export(fed, 1), export(fed, 1)
    Fed(fed.backend, text(200, seed=9)).feed(200)
    assert_same_record(sink, again[0])
    assert_same_record(block, again[1][0])
    assert block.tiles is not None
    assert not np.array_equal(fed.backend.export_block(0).tiles, block.tiles)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("model", ["llama", "mixed"])
def test_a_record_of_another_shape_or_dtype_is_refused_and_changes_nothing(
    model: str, llama: TorchBackend, mixed: TorchBackend
) -> None:
    backend = fresh({"llama": llama, "mixed": mixed}[model])
    fed = Fed(backend, text(200))
    fed.feed(200)
    sink, (block,) = export(fed, 1)
    tiles, flags = block.tiles, block.flags
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
        replace(block, exact={**block.exact, 1: sink.exact[1]}),
    ]
    bad_sinks = [
        block,
        replace(sink, dtype="float16"),
        replace(sink, tiles=tiles, flags=flags),
        replace(sink, exact={}),
        replace(sink, exact={i: x for i, x in sink.exact.items() if i != 2}),
        replace(sink, exact={**sink.exact, 3: sink.exact[0]}),
        replace(sink, exact={**sink.exact, 1: sink.exact[1][:, :, :, :-4]}),
        replace(sink, exact={**sink.exact, 1: sink.exact[1][:, :1]}),
        replace(sink, exact={**sink.exact, 1: np.concatenate([sink.exact[1]] * 2, axis=2)}),
    ]
    if model == "mixed":
        bad_blocks += [replace(block, exact={}), replace(block, exact={0: block.exact[0]})]
    for record in bad_blocks:
        with pytest.raises(RecordError):
            backend.adopt_block(record, 0)
    for record in bad_sinks:
        with pytest.raises(RecordError):
            backend.adopt_sink(record, 0)
    assert_same_record(backend.export_sink(0), sink)
    assert_same_record(backend.export_block(0), block)


@pytest.mark.parametrize("field", ["tiles", "flags"])
def test_a_record_whose_arrays_are_not_bytes_is_refused(llama: TorchBackend, field: str) -> None:
    fed = Fed(fresh(llama), text(200))
    fed.feed(200)
    block = fed.backend.export_block(0)
    with pytest.raises(RecordError):
        fed.backend.adopt_block(replace(block, **{field: getattr(block, field).astype(np.float32) + 256}), 0)


def test_a_record_of_another_preset_or_model_is_refused(llama: TorchBackend, mixed: TorchBackend) -> None:
    source = Fed(fresh(llama, WIDE), text(200))
    source.feed(200)
    sink, (block,) = export(source, 1)
    for other in (fresh(llama), fresh(mixed, WIDE)):
        with pytest.raises(RecordError):
            other.adopt_block(block, 0)
    with pytest.raises(RecordError):
        fresh(llama, Preset()).adopt_sink(sink, 0)


def test_bfloat16_records_travel_by_the_bit(llama_dir: Path) -> None:
    made = torch_backend.load(llama_dir, NARROW, LoadOptions(dtype="bfloat16", device="cpu"))
    fed = Fed(fresh(made), text(3 * G + 9))
    fed.run(3 * G)
    sink, blocks = export(fed, 2)
    assert sink.dtype == "bfloat16"
    assert sink.exact[0].shape == (2, 2, G, 128)
    other = Fed(fresh(made), fed.tokens, at=3 * G)
    other.backend.adopt_sink(sink, 0)
    for i, block in enumerate(blocks):
        other.backend.adopt_block(block, i)
    np.testing.assert_array_equal(other.run(9), fed.run(9))


@pytest.mark.parametrize("model", ["llama", "mixed"])
def test_a_fork_goes_its_own_way_from_a_copied_tail(model: str, llama: TorchBackend, mixed: TorchBackend) -> None:
    source = {"llama": llama, "mixed": mixed}[model]
    prompt, left, right = text(3 * G - 20), text(40, seed=1), text(40, seed=2)
    wants = []
    for answer in (left, right):
        fed = Fed(fresh(source), prompt + answer)
        fed.run(len(prompt))
        wants.append(np.concatenate([fed.run(30), fed.run(10)]))
    backend = fresh(source)
    parent = Fed(backend, prompt + left, slots=(0, 1), blocks=(0, 1))
    parent.run(len(prompt))
    backend.copy_exact(1, 2)
    child = Fed(backend, prompt + right, slots=(0, 2), blocks=(0, 3), at=len(prompt))
    got = [parent.run(30), child.run(30), parent.run(10), child.run(10)]
    np.testing.assert_array_equal(np.concatenate(got[0::2]), wants[0])
    np.testing.assert_array_equal(np.concatenate(got[1::2]), wants[1])


# --- failures


SIGNAL, BAD = 127, 7  # a dimension of the residual stream that only the bad token uses


def sabotaged(llama_dir: Path, projection: str, kv_head: int, weight: float) -> TorchBackend:
    """A llama whose layer 1 gives one kv head a huge key or value for the token BAD, and is itself for the others."""
    backend = load(llama_dir, NARROW)
    module = backend.model.module.model
    with torch.no_grad():
        module.embed_tokens.weight[:, SIGNAL] = 0
        module.embed_tokens.weight[BAD, SIGNAL] = 3
        module.layers[0].self_attn.o_proj.weight[SIGNAL] = 0
        module.layers[0].mlp.down_proj.weight[SIGNAL] = 0
        getattr(module.layers[1].self_attn, projection).weight[64 * kv_head + 5, SIGNAL] = weight
    backend.allocate(20, 20)
    poison(backend)
    return backend


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
    llama_dir: Path, projection: str, kv_head: int, weight: float, status: SealStatus
) -> None:
    backend = sabotaged(llama_dir, projection, kv_head, weight)
    good = text(3 * G)
    good = tuple(8 if token == BAD else token for token in good)
    bad = (*good[: G + 9], BAD, *good[G + 10 :])  # in tile 1
    spans = [
        Fed(backend, tokens, slots=(2 * i, 2 * i + 1), blocks=(2 * i, 2 * i + 1)).span(1000)
        for i, tokens in enumerate((good, bad, good))
    ]
    clean = step(backend, *(replace(span, tokens=good) for span in spans))
    assert clean.failures == ()
    kept = sealed_bytes(backend, (0, 1, 4, 5))
    result = step(backend, *spans)
    first = result.failures[0]
    assert first == Failure(span=1, layer=1, kv_head=kv_head, reason=status.reason)
    assert {failure.span for failure in result.failures} == {1}
    for i in (0, 2):
        got, want = result.outputs[i].logits, clean.outputs[i].logits
        assert got is not None
        assert want is not None
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(sealed_bytes(backend, (0, 1, 4, 5)), kept)
    again = step(backend, *(replace(span, tokens=good) for span in spans))
    assert again.failures == ()
    np.testing.assert_array_equal(one(again, 1), one(clean, 1))


@pytest.mark.parametrize("where", [3, G - 1, 2 * G + 1])
def test_a_bad_token_outside_of_sealed_tiles_is_no_failure(llama_dir: Path, where: int) -> None:
    """The sink and the tail are exact, so nothing needs a constant there; a value of 1e5 is only large."""
    backend = sabotaged(llama_dir, "v_proj", 0, 1e5)
    tokens = tuple(8 if token == BAD else token for token in text(2 * G + 5))
    tokens = (*tokens[:where], BAD, *tokens[where + 1 :])
    assert step(backend, Fed(backend, tokens).span(1000)).failures == ()


# --- the rest of the contract


@pytest.mark.parametrize("preset", [NARROW, Preset(), None], ids=lambda p: p.name if p else "exact")
@pytest.mark.parametrize("model", ["llama", "mixed"])
def test_the_memory_report_is_what_the_tensors_take_and_what_was_predicted(
    model: str, preset: Preset | None, llama: TorchBackend, mixed: TorchBackend
) -> None:
    backend = {"llama": llama, "mixed": mixed}[model].share(preset)
    blocks = 0 if preset is None else 7
    report = backend.allocate(blocks, 3)
    assert report.blocks == blocks * backend.pool_size.block_bytes
    assert report.slots == 3 * backend.pool_size.slot_bytes
    pool = backend.pool
    tensors = [*pool.exact_slots.values(), *pool.exact_blocks.values()]
    tensors += [pool.tiles, pool.flags, pool.slots] if pool.row else []
    assert report.blocks + report.slots == sum(x.untyped_storage().nbytes() for x in tensors)
    assert backend.pool_size.slot_bytes == backend.info.exact_bytes_per_token * backend.info.plan.tile_tokens


def test_nothing_runs_before_the_pools_are_there(llama: TorchBackend) -> None:
    backend = llama.share(NARROW)
    for call in (
        lambda: step(backend, Span(tokens=(5,), start=0, slots=(0,))),
        lambda: backend.export_sink(0),
        lambda: backend.copy_exact(0, 1),
    ):
        with pytest.raises(BackendError, match="call allocate first"):
            call()


def test_pools_that_do_not_fit_are_a_capacity_error(llama: TorchBackend) -> None:
    with pytest.raises(CapacityError, match="could not be allocated"):
        llama.share(NARROW).allocate(10**12, 1)


def test_sharing_shares_weights_and_nothing_else(llama: TorchBackend) -> None:
    first, second = fresh(llama), fresh(llama, None)
    assert first.model is second.model
    assert (first.info.plan.name, second.info.plan.name) == (NARROW.name, "exact")
    tokens = text(200)
    want = Fed(first, tokens).feed(64)
    first_again, other = Fed(fresh(llama), tokens), Fed(second, text(200, seed=3))
    got = []
    for _ in range(4):
        got.append(first_again.run(64))
        other.run(50)
    np.testing.assert_array_equal(np.concatenate(got), want)


def test_the_backend_says_what_it_loaded(llama: TorchBackend) -> None:
    info = llama.info
    assert (info.vocab_size, info.dtype, info.device, info.eos_token_ids) == (128, "float32", "cpu", (2, 3))
    assert info.weight_bytes == sum(p.nbytes for p in llama.model.module.parameters()) + sum(
        b.nbytes for b in llama.model.module.buffers()
    )
    assert info.exact_bytes_per_token == 3 * 2 * 2 * 64 * 4
    assert llama.available_bytes() > 0
    assert llama.peak_bytes() > info.weight_bytes
    assert set(llama.route()) == {"seal", "unseal", "decode", "attend", "attend_exact"}
