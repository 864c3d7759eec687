"""Whole steps of the torch backend over the Triton kernels, in the interpreter: dispatch, prefill, decode, buckets.

CUDA graphs are stood in for by tests/support/graph_recorder.py, which replays what was launched and nothing else.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from graph_recorder import record
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from kvarn.backend import LoadOptions
from kvarn.backends.triton import dispatch
from kvarn.backends.triton import step as step_module
from kvarn.backends.triton.backend import TorchBackend
from kvarn.backends.triton.decoder import Decoder
from kvarn.backends.triton.kernels import decode as decode_kernels
from kvarn.backends.triton.kernels import operations, probe
from kvarn.backends.triton.model import load_model
from kvarn.format import Preset
from kvarn.step import SamplingRow, Span, StepPlan, StepResult

G = 64
PRESET = Preset(key_bits=4, value_bits=2, tile_tokens=G)
CLOSE = 2e-2  # of logits: three layers of kernels, each 2e-3 of its largest output
GREEDY = SamplingRow(logprobs=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama with 3 query heads for each of its 2 kv heads."""
    return small_llama(tmp_path_factory.mktemp("llama"), kv_heads=2)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with a single kv head, for tests whose subject is when a kernel runs: the interpreter takes its time."""
    return small_llama(tmp_path_factory.mktemp("narrow"), kv_heads=1)


def small_llama(where: Path, kv_heads: int) -> Path:
    """Two layers, 3 query heads for each kv head."""
    torch.manual_seed(1)
    config = CONFIG_MAPPING["llama"](
        vocab_size=64, hidden_size=96, intermediate_size=64, num_hidden_layers=2, num_attention_heads=3 * kv_heads,
        num_key_value_heads=kv_heads, head_dim=64, max_position_embeddings=8 * G,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, p.shape[-1] ** -0.5) if p.ndim > 1 else p.add_(torch.randn_like(p) * 0.02)
    model.save_pretrained(where)
    return where


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No choice is remembered from or for other tests."""
    for cache in (dispatch._for_gpu, dispatch._say, operations._say):
        cache.cache_clear()
    yield
    for cache in (dispatch._for_gpu, dispatch._say, operations._say):
        cache.cache_clear()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU counts as a device with Triton, and the start-up check, tested by itself, takes no time."""
    monkeypatch.setattr(dispatch, "_TRITON", {"cpu", "cuda"})
    monkeypatch.setattr(probe, "probe", lambda *args: None)


def load(folder: Path, dtype: str = "float32") -> TorchBackend:
    model = load_model(folder, LoadOptions(dtype=dtype, device="cpu"))
    backend = TorchBackend(model, PRESET)
    model.module.set_attn_implementation("kvarn")
    return backend


def text(length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 64, length).tolist())


class Sequence_:
    """One sequence with blocks and slots of its own in a backend."""

    def __init__(self, seed: int, first: int) -> None:
        self.tokens = text(6 * G, seed)
        self.slots = (2 * first, 2 * first + 1)
        self.blocks = tuple(4 * first + i for i in (2, 0, 3, 1))
        self.length = 0

    def span(self, count: int, sampling: SamplingRow | None = None) -> Span:
        start, stop = self.length, self.length + count
        self.length = stop
        before, after = max(start // G - 1, 0), max(stop // G - 1, 0)
        return Span(
            tokens=self.tokens[start:stop],
            start=start,
            slots=self.slots,
            blocks=self.blocks[:before],
            seal_into=self.blocks[before:after],
            want="last",
            sampling=sampling,
        )


def poison(backend: TorchBackend) -> None:
    backend.pool.tiles.fill_(0xFF)
    backend.pool.slots.fill_(torch.nan)


def run(backend: TorchBackend, *spans: Span) -> StepResult:
    return backend.run(StepPlan(spans=spans))


def logits(result: StepResult) -> np.ndarray[Any, Any]:
    rows = [x.logits for x in result.outputs]
    assert all(x is not None for x in rows)
    return np.concatenate([x for x in rows if x is not None])


def script(backend: TorchBackend) -> list[np.ndarray[Any, Any]]:
    """Two sequences through chunks over tile edges, a verify, a mixed step, and decode across an edge."""
    backend.allocate(12, 8)
    poison(backend)
    a, b = Sequence_(1, 0), Sequence_(2, 1)
    steps = [
        lambda: (a.span(2 * G + 5),),
        lambda: (a.span(G - 5 - 2), b.span(G + 3)),
        lambda: (a.span(1), b.span(G - 5)),
        lambda: (a.span(1), b.span(1)),
        lambda: (b.span(1), a.span(1)),
        lambda: (a.span(4), b.span(1)),
    ]
    got = []
    for make in steps:
        result = run(backend, *make())
        assert not result.failures
        got.append(logits(result))
    return got


def test_steps_over_the_kernels_are_those_over_plain_operations(folder: Path, kernels: None) -> None:
    backend = load(folder)
    got = script(backend)
    assert "Triton kernels" in backend.route()["decode"]
    bytes_of_layer_0 = backend.pool.tiles[0, [2, 0]].clone()
    dispatch._TRITON.clear()
    plain = load(folder)
    for mine, wanted in zip(got, script(plain), strict=True):
        assert np.abs(mine - wanted).max() <= CLOSE * np.abs(wanted).max()
    assert "Triton" not in plain.route()["decode"]
    # No attention stands before the keys and values of layer 0.
    differing = (bytes_of_layer_0 != plain.pool.tiles[0, [2, 0]]).float().mean()
    assert differing <= 1e-3


def test_decode_and_prefill_go_through_the_kernels(
    folder: Path, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    for module, name in ((decode_kernels, "_attend"), (operations.prefill_kernels, "_attend")):
        kernel = getattr(module, name)

        class Spy:
            def __getitem__(self, grid: Any, kernel: Any = kernel, module: Any = module) -> Any:
                called.append(module.__name__.rpartition(".")[2])
                return kernel[grid]

        monkeypatch.setattr(module, name, Spy())
    backend = load(folder)
    backend.allocate(12, 8)
    a = Sequence_(1, 0)
    run(backend, a.span(3))
    run(backend, a.span(1))
    assert called == ["prefill", "prefill", "decode", "decode"]


def test_shapes_that_prefill_does_not_take_run_plainly_and_say_so(
    narrow: Path, kernels: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvarn.backends.triton.kernels import prefill_plan

    monkeypatch.setitem(prefill_plan.ROWS, 64, 2)  # fewer rows than the 3 query heads of a kv head
    monkeypatch.setattr(prefill_plan, "SMALLEST_ROWS", 2)
    got = script(load(narrow))
    assert [r.getMessage() for r in caplog.records if "plain torch" in r.getMessage()] == [
        "kvarn: prefill runs on plain torch operations, which is slow: 3 query heads per kv head at head_dim 64 are "
        "more than the 2 that the prefill kernel takes in torch.float32; use the plain torch version"
    ]
    dispatch._TRITON.clear()
    for mine, wanted in zip(got, script(load(narrow)), strict=True):
        assert np.abs(mine - wanted).max() <= CLOSE * np.abs(wanted).max()


# Buckets and graphs.


def decoding(folder: Path, capture: Any, seeds: Sequence[int]) -> tuple[TorchBackend, list[Sequence_]]:
    """A backend whose sequences stand just before a tile edge, each by another number of tokens."""
    backend = load(folder)
    backend.allocate(4 * len(seeds), 2 * len(seeds))
    backend._decoder = Decoder(backend.model, backend.info.plan, backend.pool, backend._operations(), capture)
    poison(backend)
    sequences = [Sequence_(seed, i) for i, seed in enumerate(seeds)]
    for i, one in enumerate(sequences):
        run(backend, one.span((i + 1) * G - 2 - i))
    return backend, sequences


graph = partial(record, decode_kernels, ("_fold", "_attend", "_combine"))


def decode(backend: TorchBackend, sequences: Sequence[Sequence_], steps: int) -> list[Any]:
    """Decode with a changing number of rows: all, all but the last, all, ..."""
    got: list[Any] = []
    for i in range(steps):
        rows = sequences if i % 2 == 0 else sequences[:-1]
        result = run(backend, *(x.span(1, GREEDY) for x in rows))
        got.append([(x.token, x.logprob, x.top_logprobs) for x in result.outputs])
        assert not result.failures
    return got


def test_replays_give_the_bits_of_direct_runs_across_tile_edges(narrow: Path, kernels: None) -> None:
    captured: list[Callable[[], None]] = []

    def capture(step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        replay, output = graph(step)
        return lambda: (captured.append(replay), replay())[1], output

    direct, sequences = decoding(narrow, None, (1, 2, 3))
    want = decode(direct, sequences, 5)
    replayed, sequences = decoding(narrow, capture, (1, 2, 3))
    assert decode(replayed, sequences, 5) == want
    assert len(captured) == 5
    live = [block for x in sequences for block in x.blocks[: max(x.length // G - 1, 0)]]
    assert live
    assert torch.equal(replayed.pool.tiles[:, live], direct.pool.tiles[:, live])
    assert torch.equal(replayed.pool.flags[:, live], direct.pool.flags[:, live])


def test_a_row_has_the_same_answer_alone_and_beside_others(narrow: Path, kernels: None) -> None:
    together, sequences = decoding(narrow, None, (1, 2))
    want = [x[0] for x in decode(together, sequences, 3)]
    alone, sequences = decoding(narrow, None, (1, 2))
    got = [run(alone, sequences[0].span(1, GREEDY)).outputs[0] for _ in range(3)]
    for mine, (token, logprob, _) in zip(got, want, strict=True):
        assert mine.token == token
        assert mine.logprob == pytest.approx(logprob, abs=1e-4)  # its matrix products have another shape


def test_two_engines_in_one_process_do_not_disturb_each_other(narrow: Path, kernels: None) -> None:
    want = []
    for seeds in ((1, 2), (3, 4)):
        backend, sequences = decoding(narrow, graph, seeds)
        want.append(decode(backend, sequences, 4))
    both = [decoding(narrow, graph, seeds) for seeds in ((1, 2), (3, 4))]
    got: list[list[Any]] = [[], []]
    for i in range(4):
        for k, (backend, sequences) in enumerate(both):
            rows = sequences if i % 2 == 0 else sequences[:-1]
            result = run(backend, *(x.span(1, GREEDY) for x in rows))
            got[k].append([(x.token, x.logprob, x.top_logprobs) for x in result.outputs])
    assert got == want


def test_a_model_that_cannot_be_captured_runs_directly_and_says_so(
    narrow: Path, kernels: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend, sequences = decoding(narrow, None, (1, 2))
    want = decode(backend, sequences, 2)
    forward = type(backend.model).forward_rows

    def reads(self: Any, tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        assert int(tokens.max()) >= 0
        return forward(self, tokens, *rest)

    monkeypatch.setattr(type(backend.model), "forward_rows", reads)
    backend, sequences = decoding(narrow, graph, (1, 2))
    assert decode(backend, sequences, 2) == want
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 1
    assert said[0].startswith("kvarn: decode steps run without CUDA graphs: this model cannot be captured")


def test_steps_that_are_not_decode_alone_or_too_large_go_the_other_way(narrow: Path, kernels: None) -> None:
    backend, sequences = decoding(narrow, None, (1, 2))
    decoder = backend._decoder
    assert decoder is not None
    row = sequences[0].span(1, GREEDY)
    assert decoder.takes([row])
    assert not decoder.takes([row, sequences[1].span(2)])
    assert not decoder.takes([row] * 65)
    assert [bucket.rows.size for bucket in decoder._buckets] == [1, 2, 4]
    assert step_module.decode_row(row, G).tail == sequences[0].slots[0]  # tile 0 fills: the sink is the tail


# The start-up check.


def test_the_start_up_check_passes_the_kernels() -> None:
    for dtype in (torch.float32, torch.float16):
        assert probe.probe(Preset(tile_tokens=G).with_head_dim(64), 3, 1, dtype, "cpu") is None


def break_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    seal = operations.seal

    def wrong(*args: Any) -> Any:
        tiles, flags, status = seal(*args)
        tiles[-1, -1, -1] ^= 1
        return tiles, flags, status

    monkeypatch.setattr(operations, "seal", wrong)


def break_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    decode_ = operations.decode
    monkeypatch.setattr(operations, "decode", lambda *args: decode_(*args) * 1.02)


def break_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = operations.attend
    monkeypatch.setattr(operations, "attend", lambda *args: attend(*args) * 1.02)


def fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*args: Any) -> Any:
        raise RuntimeError("PTX was compiled with an unsupported toolchain\nmore")

    monkeypatch.setattr(operations, "seal", raises)


@pytest.mark.parametrize(
    ("sabotage", "said"),
    [
        (break_seal, "a tile sealed by the Triton kernel is not the reference's, byte for byte"),
        (break_decode, "the Triton decode kernel is "),
        (break_prefill, "the Triton prefill kernel is "),
        (fail, "the Triton kernels do not run here: RuntimeError: PTX was compiled with an unsupported toolchain"),
    ],
)
def test_kernels_that_go_wrong_on_a_device_are_not_used_there(
    sabotage: Callable[[pytest.MonkeyPatch], None],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(dispatch, "_TRITON", {"cpu", "cuda"})
    sabotage(monkeypatch)
    fmt = Preset(tile_tokens=G).with_head_dim(64)
    for _ in range(2):
        chosen = dispatch.choose(fmt, "cpu", heads=2, kv_heads=1, dtype=torch.float32)
        assert not chosen.triton
        assert said in chosen.why
    assert len(caplog.records) == 1
    assert said in caplog.records[0].getMessage()
