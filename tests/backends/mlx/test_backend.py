"""The MLX backend's contract on tiny models: no schedule changes an answer, records travel, failures stay alone.

LOGITS and CODES say how far two schedules may differ: a matrix product of another shape rounds otherwise, now and then
that moves a code, and a moved code moves what later queries read.
"""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray
from small_models import Fed, Logits, build, distance, prompt, run, step

from kvarn import record as records
from kvarn import reference
from kvarn.backend import LoadOptions, Record
from kvarn.backends.mlx import backend as mlx_backend
from kvarn.backends.mlx.backend import MlxBackend
from kvarn.backends.mlx.sampling import sample
from kvarn.backends.triton import backend as torch_backend
from kvarn.errors import BackendError, CapacityError, RecordError
from kvarn.format import Preset, SealStatus
from kvarn.keys import block_key
from kvarn.step import Failure, SamplingRow, Span, StepPlan

G = 64
NARROW = Preset(key_bits=4, value_bits=2, tile_tokens=G)
WIDE = Preset(key_bits=8, value_bits=8, tile_tokens=G)
LOGITS = {NARROW: 2e-3, Preset(): 2e-3, WIDE: 1e-4, None: 1e-5}  # relative, over all logits of the prompt
CODES = 1e-3  # the share of bytes of sealed tiles
OPTIONS = LoadOptions(dtype="float32", device="cpu")
MIXED = {"sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"]}


def name(preset: Preset | None) -> str:
    return preset.name if preset else "exact"


@pytest.fixture(scope="session")
def mixed_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sliding layer before a full one."""
    folder = tmp_path_factory.mktemp("mixed")
    build(folder, "cohere2", hidden_size=256, num_key_value_heads=2, num_attention_heads=4, **MIXED)
    return folder


@pytest.fixture(scope="session")
def alone_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family whose sequences run one after another."""
    folder = tmp_path_factory.mktemp("alone")
    build(folder, "gpt_bigcode")
    return folder


@pytest.fixture(scope="session")
def models(llama_dir: Path, mixed_dir: Path, alone_dir: Path) -> dict[str, MlxBackend]:
    folders = {"llama": llama_dir, "mixed": mixed_dir, "alone": alone_dir}
    return {key: mlx_backend.load(folder, NARROW, OPTIONS) for key, folder in folders.items()}


@pytest.fixture(scope="session")
def llama(models: dict[str, MlxBackend]) -> MlxBackend:
    return models["llama"]


def fresh(backend: MlxBackend, preset: Preset | None = NARROW, blocks: int = 20, slots: int = 20) -> MlxBackend:
    """Another backend over the same weights, its pools full of garbage."""
    other = backend.share(preset)
    other.allocate(blocks, slots)
    poison(other)
    return other


def poison(backend: MlxBackend) -> None:
    """NaN in every exact page, 0xFF (a NaN too) in every tile."""
    pool = backend.pool
    for x in (*pool.tiles, *pool.flags):
        x[:] = 0xFF
    for layers in (pool.slots, pool.exact_blocks):
        for pages in layers.values():
            for page in pages:
                page[:] = mx.nan
    mx.eval(pool.tiles, pool.flags, pool.slots, pool.exact_blocks)


def feed(fed: Fed, chunk: int) -> Logits:
    """Run all that is left in chunks."""
    logits = [run(fed.backend, fed.span(chunk))[0] for _ in range(fed.at, len(fed.tokens), chunk)]
    assert np.isfinite(np.concatenate(logits)).all(), "garbage was read"
    return np.concatenate(logits)


def sealed_bytes(backend: MlxBackend, blocks: Sequence[int]) -> NDArray[np.uint8]:
    """Tiles and flags of blocks, `[L, blocks, Hk, nbytes + 1]`."""
    tiles, flags = (np.array(mx.stack(x))[:, list(blocks)] for x in (backend.pool.tiles, backend.pool.flags))
    return np.concatenate([tiles, flags[..., None]], axis=-1)


# --- schedules


@pytest.mark.parametrize("preset", [NARROW, Preset(), WIDE, None], ids=name)
@pytest.mark.parametrize("model", ["llama", "mixed"])
def test_no_chunk_size_changes_an_answer(models: dict[str, MlxBackend], model: str, preset: Preset | None) -> None:
    tokens = prompt(420)
    whole = fresh(models[model], preset)
    want = feed(Fed(whole, tokens), 420)
    assert want.shape == (420, 256)
    for chunk in (64, 100, 129):
        backend = fresh(models[model], preset)
        error = distance(feed(Fed(backend, tokens), chunk), want)
        assert error < LOGITS[preset], f"chunks of {chunk}: {error:.2g}"
        if preset is not None:
            sealed = range(420 // preset.tile_tokens - 1)
            differ = sealed_bytes(backend, sealed) != sealed_bytes(whole, sealed)
            assert differ.mean() < CODES, f"chunks of {chunk}: {differ.mean():.2g}"


@pytest.mark.parametrize("preset", [NARROW, None], ids=name)
@pytest.mark.parametrize("model", ["llama", "mixed", "alone"])
def test_token_by_token_is_the_same_as_at_once(
    models: dict[str, MlxBackend], model: str, preset: Preset | None
) -> None:
    tokens = prompt(3 * G + 3)
    whole, single = fresh(models[model], preset), fresh(models[model], preset)
    assert distance(feed(Fed(single, tokens), 1), feed(Fed(whole, tokens), 1000)) < LOGITS[preset]
    if preset is not None:
        assert (sealed_bytes(single, range(2)) != sealed_bytes(whole, range(2))).mean() < CODES


def test_tiles_are_sealed_from_the_exact_keys_of_their_own_layer(llama: MlxBackend) -> None:
    """What `exact` keeps, sealed by the oracle, is what the blocks of the first layer hold.

    The deeper layers of the two read other values, since one reads sealed tiles.
    """
    tokens = prompt(3 * G)
    exact, backend = fresh(llama, None), fresh(llama)
    feed(Fed(exact, tokens), 100)
    feed(Fed(backend, tokens), 100)
    fmt = backend.info.plan.tile_format
    assert fmt is not None
    kept = np.concatenate([np.array(exact.pool.slot(0, slot)) for slot in (0, 1)], axis=2)  # [2, Hk, T, D]
    for tile, head in ((1, 0), (1, 1), (2, 0), (2, 1)):
        keys, values = np.ascontiguousarray(kept[:, head, tile * G : (tile + 1) * G])
        want, flag = reference.seal(keys, values, fmt)
        np.testing.assert_array_equal(np.array(backend.pool.tiles[0][tile - 1, head]), want)
        assert backend.pool.flags[0][tile - 1, head].item() == flag


@pytest.mark.parametrize("preset", [NARROW, None], ids=name)
def test_recycled_blocks_and_slots_hold_nothing_of_their_last_owner(llama: MlxBackend, preset: Preset | None) -> None:
    tokens = prompt(200)
    want = feed(Fed(fresh(llama, preset), tokens), 70)
    backend = fresh(llama, preset)
    feed(Fed(backend, prompt(390, seed=1)), 70)
    for _ in range(2):
        np.testing.assert_array_equal(feed(Fed(backend, tokens), 70), want)


@pytest.mark.parametrize("preset", [NARROW, None], ids=name)
@pytest.mark.parametrize("model", ["llama", "mixed", "alone"])
def test_spans_in_one_step_are_what_each_is_alone(
    models: dict[str, MlxBackend], model: str, preset: Preset | None
) -> None:
    """Decode beside prefill, a later chunk that completes tiles, and a sequence of one token."""
    source = models[model]
    assert source.model.batched == (model != "alone")
    backend = fresh(source, preset, 40, 40)
    wants, sequences = [], []
    for i, (begun, count) in enumerate([(200, 1), (0, 150), (100, 170), (0, 1), (64, 64), (127, 1)]):
        tokens = prompt(begun + count, seed=i)
        alone, fed = Fed(fresh(source, preset), tokens), Fed(backend, tokens, first=6 * i)
        if begun:
            np.testing.assert_array_equal(*(run(x.backend, x.span(begun))[0] for x in (alone, fed)))
        wants.append(run(alone.backend, alone.span(count))[0])
        sequences.append(fed)
    got = run(backend, *(fed.span(1000) for fed in sequences))
    for i, want in enumerate(wants):
        assert distance(got[i], want) < LOGITS[preset], f"span {i}"


def test_another_thread_may_run_the_steps(llama: MlxBackend) -> None:
    """The engine loads on one thread and runs on its own."""
    tokens = prompt(200)
    want = feed(Fed(fresh(llama), tokens), 100)
    backend, got = fresh(llama), []
    thread = threading.Thread(target=lambda: got.append(feed(Fed(backend, tokens), 100)))
    thread.start()
    thread.join()
    np.testing.assert_array_equal(got[0], want)


# --- what a span asks for


@pytest.mark.parametrize("model", ["llama", "alone"])
def test_a_span_gets_none_the_last_or_all_logits(models: dict[str, MlxBackend], model: str) -> None:
    tokens = prompt(90)
    backend = fresh(models[model])
    want = feed(Fed(backend, tokens), 90)
    spans = [Fed(backend, tokens, first=2 * i).span(90, w) for i, w in enumerate(("none", "last", "all", "none"))]
    outputs = step(backend, *spans).outputs
    assert [None if x.logits is None else x.logits.shape for x in outputs] == [None, (1, 256), (90, 256), None]
    assert outputs[1].logits is not None
    assert outputs[2].logits is not None
    assert distance(outputs[1].logits, want[-1:]) < 1e-5
    assert distance(outputs[2].logits, want) < 1e-5
    assert all(x.token is None and x.logprob is None for x in outputs)


def test_a_step_that_wants_no_logits_runs_all_the_same(llama: MlxBackend) -> None:
    tokens = prompt(3 * G + 5)
    want = feed(Fed(fresh(llama), tokens), 100)
    fed = Fed(fresh(llama), tokens)
    assert run(fed.backend, fed.span(100, "none")) == []
    np.testing.assert_array_equal(feed(fed, 1000), want[100:])


@pytest.mark.parametrize("model", ["llama", "alone"])
def test_tokens_are_sampled_from_the_last_logits(models: dict[str, MlxBackend], model: str) -> None:
    """Greedy, random and unsampled spans in one step; tokens and log-probabilities as from the logits themselves."""
    random = SamplingRow(temperature=1.5, top_k=20, uniform=0.83, logprobs=3)
    rows = [SamplingRow(), random, None, SamplingRow(temperature=1, uniform=0.2)]
    backend = fresh(models[model])
    spans = [Fed(backend, prompt(70 + i, seed=i), first=2 * i).span(100, "last", row) for i, row in enumerate(rows)]
    sampled = step(backend, *spans).outputs
    plain = run(backend, *(replace(span, sampling=None) for span in spans))
    for row, output, logits in zip(rows, sampled, plain, strict=True):
        if row is None:
            assert output.logits is not None
            np.testing.assert_array_equal(output.logits, logits)
            assert output.token is None
            continue
        want = sample(mx.array(logits), [row])[0]
        assert output.logits is None
        assert output.token == want.token
        assert output.logprob == pytest.approx(want.logprob, rel=1e-4)
        assert [token for token, _ in output.top_logprobs] == [token for token, _ in want.top_logprobs]
    assert len(sampled[1].top_logprobs) == 3


# --- records


def export(fed: Fed, count: int) -> tuple[Record, list[Record]]:
    """The sink and the first `count` blocks of a sequence."""
    return fed.backend.export_sink(fed.first), [fed.backend.export_block(fed.first + i) for i in range(count)]


def filed(record: Record) -> Record:
    """The record after a way through a file."""
    tokens = tuple(range(G))
    parent = bytes(32)
    meta = records.BlockMeta(
        key=block_key(parent, tokens), parent=parent, tokens=tokens, fingerprint=bytes(32), format="f"
    )
    return records.parse(records.build(meta, record))[1]


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


@pytest.mark.parametrize("way", ["mlx to torch", "torch to mlx", "mlx to mlx"])
@pytest.mark.parametrize("preset", [NARROW, WIDE], ids=name)
@pytest.mark.parametrize("model", ["llama", "mixed"])
def test_records_carry_a_prefix_into_another_backend(
    models: dict[str, MlxBackend], llama_dir: Path, mixed_dir: Path, model: str, preset: Preset, way: str
) -> None:
    """Both ways between MLX and torch, through a file, with the same logits within float32 rounding."""
    torch = torch_backend.load({"llama": llama_dir, "mixed": mixed_dir}[model], preset, OPTIONS)
    torch.allocate(20, 20)
    one, other = (torch if x == "torch" else fresh(models[model], preset) for x in way.split(" to "))
    tokens = prompt(5 * G + 30)
    source, target = Fed(one, tokens), Fed(other, tokens, first=5, at=5 * G)
    run(one, source.span(5 * G))
    sink, blocks = export(source, 4)
    other.adopt_sink(filed(sink), 5)
    for i, record in enumerate(blocks):
        other.adopt_block(filed(record), 5 + i)
    for i, record in enumerate(blocks):
        assert_same_record(other.export_block(5 + i), record)
    assert_same_record(other.export_sink(5), sink)
    for count in (20, 1, 9):
        got, want = (run(x.backend, x.span(count))[0] for x in (target, source))
        assert distance(got, want) < 1e-5


def test_under_exact_every_slot_is_a_sink_and_travels(llama: MlxBackend) -> None:
    tokens, g = prompt(300), Preset().tile_tokens
    source, target = Fed(fresh(llama, None), tokens), Fed(fresh(llama, None), tokens, first=9, at=2 * g)
    run(source.backend, source.span(2 * g))
    for i in range(2):
        target.backend.adopt_sink(source.backend.export_sink(i), 9 + i)
    np.testing.assert_array_equal(feed(target, 100), feed(source, 100))


def test_an_export_is_a_copy(llama: MlxBackend) -> None:
    fed = Fed(fresh(llama), prompt(200))
    feed(fed, 200)
    (sink, (block,)), again = export(fed, 1), export(fed, 1)
    feed(Fed(fed.backend, prompt(200, seed=9)), 200)
    assert_same_record(sink, again[0])
    assert_same_record(block, again[1][0])
    changed = fed.backend.export_block(0)
    assert block.tiles is not None
    assert changed.tiles is not None
    assert not np.array_equal(changed.tiles, block.tiles)


@pytest.mark.parametrize("model", ["llama", "mixed"])
def test_a_record_of_another_shape_or_dtype_is_refused_and_changes_nothing(
    models: dict[str, MlxBackend], model: str
) -> None:
    fed = Fed(fresh(models[model]), prompt(200))
    feed(fed, 200)
    backend, (sink, (block,)) = fed.backend, export(fed, 1)
    tiles, flags = block.tiles, block.flags
    assert tiles is not None
    assert flags is not None
    bad_blocks = [
        sink,
        replace(block, dtype="bfloat16"),
        replace(block, tiles=None),
        replace(block, tiles=tiles[:, :, :-1]),
        replace(block, flags=flags[:, :1]),
        replace(block, flags=flags.astype(np.float32)),
        replace(block, exact={**block.exact, 1: sink.exact[1]}),
        *([replace(block, exact={})] if model == "mixed" else []),
    ]
    bad_sinks = [
        block,
        replace(sink, dtype="float16"),
        replace(sink, tiles=tiles, flags=flags),
        replace(sink, exact={0: sink.exact[0]}),
        replace(sink, exact={**sink.exact, 1: sink.exact[1][:, :, :, :-4]}),
    ]
    for record in bad_blocks:
        with pytest.raises(RecordError):
            backend.adopt_block(record, 0)
    for record in bad_sinks:
        with pytest.raises(RecordError):
            backend.adopt_sink(record, 0)
    assert_same_record(backend.export_sink(0), sink)
    assert_same_record(backend.export_block(0), block)


def test_bfloat16_records_travel_by_the_bit(llama: MlxBackend, llama_dir: Path) -> None:
    made = mlx_backend.load(llama_dir, NARROW, LoadOptions(dtype="bfloat16", device="cpu"))
    fed = Fed(fresh(made), prompt(2 * G + 5))
    run(fed.backend, fed.span(2 * G))
    sink, blocks = export(fed, 1)
    assert sink.dtype == "bfloat16"
    assert sink.exact[0].shape == (2, 2, G, 128)
    other = Fed(fresh(made), fed.tokens, at=2 * G)
    other.backend.adopt_sink(sink, 0)
    other.backend.adopt_block(blocks[0], 0)
    assert_same_record(other.backend.export_sink(0), sink)
    np.testing.assert_array_equal(feed(other, 5), feed(fed, 5))
    with pytest.raises(RecordError):
        fresh(llama).adopt_sink(sink, 0)


@pytest.mark.parametrize("model", ["llama", "mixed"])
def test_a_fork_goes_its_own_way_from_a_copied_tail(models: dict[str, MlxBackend], model: str) -> None:
    """Two sequences share the sink and a block; each has its own tail, and seals its own next block."""
    source = models[model]
    common, left, right = prompt(3 * G - 20), prompt(40, seed=1), prompt(40, seed=2)
    wants = []
    for answer in (left, right):
        fed = Fed(fresh(source), common + answer)
        run(fed.backend, fed.span(len(common)))
        wants.append(feed(fed, 30))
    backend = fresh(source)
    parent, child = Fed(backend, common + left), Fed(backend, common + right, at=len(common))
    run(backend, parent.span(len(common)))
    backend.copy_exact(1, 2)
    got: list[list[Logits]] = [[], []]
    for count in (30, 10):
        got[0] += run(backend, parent.span(count))
        span = child.span(count)
        moved = {0: 0, 1: 3}  # the child's second block is 3
        got[1] += run(
            backend,
            replace(
                span,
                slots=(0, 2),
                blocks=tuple(moved[i] for i in span.blocks),
                seal_into=tuple(moved[i] for i in span.seal_into),
            ),
        )
    for parts, want in zip(got, wants, strict=True):
        np.testing.assert_array_equal(np.concatenate(parts), want)


# --- failures


SIGNAL, BAD = 127, 7  # a dimension of the residual stream that only the bad token uses


def sabotaged(folder: Path, projection: str, kv_head: int, weight: float) -> MlxBackend:
    """A llama whose layer 1 gives one kv head a huge key or value for the token BAD, and is itself for the others."""
    backend = mlx_backend.load(folder, NARROW, OPTIONS)
    module = backend.model.module.model
    module.embed_tokens.weight[:, SIGNAL] = 0
    module.embed_tokens.weight[BAD, SIGNAL] = 3
    module.layers[0].self_attn.o_proj.weight[SIGNAL] = 0
    module.layers[0].mlp.down_proj.weight[SIGNAL] = 0
    module.layers[1].self_attn[projection].weight[64 * kv_head + 5, SIGNAL] = weight
    return fresh(backend)


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
    good = tuple(8 if token == BAD else token for token in prompt(3 * G))
    bad = (*good[: G + 9], BAD, *good[G + 10 :])  # in tile 1
    spans = [Fed(backend, tokens, first=2 * i).span(1000) for i, tokens in enumerate((good, bad, good))]
    clean = run(backend, *(replace(span, tokens=good) for span in spans))
    kept = sealed_bytes(backend, (0, 1, 4, 5))
    result = backend.run(StepPlan(spans=tuple(spans)))
    assert result.failures[0] == Failure(span=1, layer=1, kv_head=kv_head, reason=status.reason)
    assert {failure.span for failure in result.failures} == {1}
    for i in (0, 2):
        got = result.outputs[i].logits
        assert got is not None
        np.testing.assert_array_equal(got, clean[i])
    np.testing.assert_array_equal(sealed_bytes(backend, (0, 1, 4, 5)), kept)
    again = run(backend, *(replace(span, tokens=good) for span in spans))
    np.testing.assert_array_equal(again[1], clean[1])


def test_a_failure_is_counted_from_the_whole_plan_where_sequences_run_one_after_another(llama_dir: Path) -> None:
    backend = sabotaged(llama_dir, "v_proj", 1, 1e9)
    backend.model = replace(backend.model, batched=False)
    good = tuple(8 if token == BAD else token for token in prompt(2 * G))
    bad = (*good[: G + 9], BAD, *good[G + 10 :])
    spans = [Fed(backend, tokens, first=2 * i).span(1000, "last") for i, tokens in enumerate((good, good, bad))]
    failures = backend.run(StepPlan(spans=tuple(spans))).failures
    assert failures == (Failure(span=2, layer=1, kv_head=1, reason=SealStatus.VALUES_OVERFLOW.reason),)


@pytest.mark.parametrize("where", [3, G - 1, 2 * G + 1])
def test_a_bad_token_outside_of_sealed_tiles_is_no_failure(llama_dir: Path, where: int) -> None:
    """The sink and the tail are exact, so nothing needs a constant there; a value of 1e5 is only large."""
    backend = sabotaged(llama_dir, "v_proj", 0, 1e5)
    tokens = tuple(8 if token == BAD else token for token in prompt(2 * G + 5))
    run(backend, Fed(backend, (*tokens[:where], BAD, *tokens[where + 1 :])).span(1000))


# --- the rest of the contract


@pytest.mark.parametrize("preset", [NARROW, Preset(), None], ids=name)
@pytest.mark.parametrize("model", ["llama", "mixed"])
def test_the_memory_report_is_what_was_predicted(
    models: dict[str, MlxBackend], model: str, preset: Preset | None
) -> None:
    backend = models[model].share(preset)
    blocks = 0 if preset is None else 7
    report = backend.allocate(blocks, 3)
    assert report.blocks == blocks * backend.pool_size.block_bytes
    assert report.slots == 3 * backend.pool_size.slot_bytes
    assert backend.pool_size.slot_bytes == backend.info.exact_bytes_per_token * backend.info.plan.tile_tokens
    feed(Fed(backend, prompt(200)), 100)
    assert backend.pool.report() == report


def test_nothing_runs_before_the_pools_are_there(llama: MlxBackend) -> None:
    backend = llama.share(NARROW)
    for call in (
        lambda: step(backend, Span(tokens=(5,), start=0, slots=(0,))),
        lambda: backend.export_sink(0),
        lambda: backend.copy_exact(0, 1),
    ):
        with pytest.raises(BackendError, match="call allocate first"):
            call()


def test_pools_that_do_not_fit_are_a_capacity_error(llama: MlxBackend) -> None:
    with pytest.raises(CapacityError, match="does not fit"):
        llama.share(NARROW).allocate(10**12, 1)


def test_sharing_shares_weights_and_nothing_else(llama: MlxBackend) -> None:
    first, second = fresh(llama), fresh(llama, None)
    assert first.model is second.model
    assert (first.info.plan.name, second.info.plan.name) == (NARROW.name, "exact")
    tokens = prompt(200)
    want = feed(Fed(first, tokens), 64)
    again, other = Fed(fresh(llama), tokens), Fed(second, prompt(200, seed=3))
    got = []
    for _ in range(4):
        got += run(again.backend, again.span(64))
        run(other.backend, other.span(50))
    np.testing.assert_array_equal(np.concatenate(got), want)


def test_the_backend_says_what_it_loaded(llama: MlxBackend) -> None:
    info = llama.info
    assert (info.vocab_size, info.dtype, info.device, info.eos_token_ids) == (256, "float32", "cpu", (2,))
    assert info.exact_bytes_per_token == 2 * 2 * 2 * 64 * 4
    assert llama.available_bytes() > 0
    assert llama.peak_bytes() > info.weight_bytes > 0
    assert {"seal", "unseal", "attend", "attend_exact", "step"} == set(llama.route())
