"""The MLX backend: the contract of every backend, records that go over to torch and back, and families without rows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from backend_contract import (
    BAD,
    NARROW,
    OPTIONS,
    SIGNAL,
    WIDE,
    BackendContract,
    Framework,
    G,
    assert_same_record,
    export,
    good_text,
    name,
    text,
    with_bad_token,
)
from small_models import Fed, Logits, build, distance

from kvarn import record as records
from kvarn.backend import LoadOptions, Record
from kvarn.backends.mlx import backend as mlx_backend
from kvarn.backends.mlx.backend import MlxBackend
from kvarn.backends.mlx.sampling import sample
from kvarn.backends.triton import backend as torch_backend
from kvarn.format import Preset, SealStatus
from kvarn.keys import block_key
from kvarn.step import Failure, SamplingRow, StepPlan
from kvarn.tile import Bytes

MIXED = {"sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.fixture(scope="session")
def mixed_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sliding layer before a full one."""
    folder = tmp_path_factory.mktemp("mixed")
    build(folder, "cohere2", hidden_size=256, num_key_value_heads=2, num_attention_heads=4, **MIXED)
    return folder


class MlxFramework(Framework):
    capacity_error = "does not fit"
    routes = frozenset({"seal", "unseal", "attend", "attend_exact", "step"})

    def load(self, folder: Path, preset: Preset | None, options: LoadOptions) -> MlxBackend:
        return mlx_backend.load(folder, preset, options)

    def poison(self, backend: MlxBackend) -> None:
        pool = backend.pool
        for x in (*pool.tiles, *pool.flags):
            x[:] = 0xFF
        for layers in (pool.slots, pool.exact_blocks):
            for pages in layers.values():
                for page in pages:
                    page[:] = mx.nan
        mx.eval(pool.tiles, pool.flags, pool.slots, pool.exact_blocks)

    def sealed(self, backend: MlxBackend) -> tuple[Bytes, Bytes]:
        return np.array(mx.stack(backend.pool.tiles)), np.array(mx.stack(backend.pool.flags))

    def slot(self, backend: MlxBackend, layer: int, index: int) -> Logits:
        return np.array(backend.pool.slot(layer, index))

    def exact_blocks(self, backend: MlxBackend, layer: int, count: int) -> Logits:
        return np.array(mx.stack(backend.pool.exact_blocks[layer][:count]))

    def pool_bytes(self, backend: MlxBackend) -> int:
        report = backend.pool.report()  # it counts the arrays
        return report.blocks + report.slots

    def sample(self, logits: Logits, row: SamplingRow) -> Any:
        return sample(mx.array(logits), [row])[0]

    def sabotage(self, backend: MlxBackend, projection: str, row: int, weight: float) -> None:
        module = backend.model.module.model
        module.embed_tokens.weight[:, SIGNAL] = 0
        module.embed_tokens.weight[BAD, SIGNAL] = 3
        module.layers[0].self_attn.o_proj.weight[SIGNAL] = 0
        module.layers[0].mlp.down_proj.weight[SIGNAL] = 0
        module.layers[1].self_attn[projection].weight[row, SIGNAL] = weight


MLX = MlxFramework()


@pytest.fixture(scope="module")
def models(llama_dir: Path, mixed_dir: Path) -> dict[str, MlxBackend]:
    return MLX.load_all(llama=llama_dir, mixed=mixed_dir)


class TestMlx(BackendContract):
    framework = MLX

    def test_sizes_and_special_tokens_are_the_checkpoints(self, llama: MlxBackend) -> None:
        assert (llama.info.vocab_size, llama.info.eos_token_ids) == (256, (2,))


# --- families whose sequences run one after another


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> MlxBackend:
    folder = tmp_path_factory.mktemp("alone")
    build(folder, "gpt_bigcode")
    backend = mlx_backend.load(folder, NARROW, OPTIONS)
    assert not backend.model.batched
    return backend


@pytest.mark.parametrize("preset", [NARROW, None], ids=name)
def test_without_rows_token_by_token_is_the_same_as_at_once(alone: MlxBackend, preset: Preset | None) -> None:
    MLX.assert_token_by_token_is_the_same(alone, preset)


@pytest.mark.parametrize("preset", [NARROW, None], ids=name)
def test_without_rows_spans_in_one_step_are_what_each_is_alone(alone: MlxBackend, preset: Preset | None) -> None:
    MLX.assert_spans_are_what_each_is_alone(alone, preset)


def test_without_rows_a_span_gets_what_it_asks_for(alone: MlxBackend) -> None:
    MLX.assert_logits_as_wanted(alone)
    MLX.assert_sampled_from_the_last_logits(alone)


def test_a_failure_is_counted_from_the_whole_plan_where_sequences_run_one_after_another(llama_dir: Path) -> None:
    backend = MLX.sabotaged(llama_dir, "v_proj", 1, 1e9)
    assert backend.model.batched  # as are those of the contract
    backend.model = replace(backend.model, batched=False)
    good = good_text(2 * G)
    bad = with_bad_token(good, G + 9)
    spans = [Fed(backend, tokens, first=2 * i).span(1000, "last") for i, tokens in enumerate((good, good, bad))]
    failures = backend.run(StepPlan(spans=tuple(spans))).failures
    assert failures == (Failure(span=2, layer=1, kv_head=1, reason=SealStatus.VALUES_OVERFLOW.reason),)


# --- records over to torch and back


def filed(record: Record) -> Record:
    """The record after a way through a file."""
    tokens = tuple(range(G))
    parent = bytes(32)
    meta = records.BlockMeta(
        key=block_key(parent, tokens), parent=parent, tokens=tokens, fingerprint=bytes(32), format="f"
    )
    return records.parse(records.build(meta, record))[1]


@pytest.mark.parametrize("way", ["mlx to torch", "torch to mlx", "mlx to mlx"])
@pytest.mark.parametrize("preset", [NARROW, WIDE], ids=name)
@pytest.mark.parametrize("model", ["llama", "mixed"])
def test_records_carry_a_prefix_between_frameworks(
    llama_dir: Path, mixed_dir: Path, model: str, preset: Preset, way: str
) -> None:
    """Both ways between MLX and torch, through a file, with the same logits within float32 rounding."""
    folder = {"llama": llama_dir, "mixed": mixed_dir}[model]
    torch, mlx = torch_backend.load(folder, preset, OPTIONS), mlx_backend.load(folder, preset, OPTIONS)
    torch.allocate(20, 20)
    one, other = (torch if x == "torch" else MLX.fresh(mlx, preset) for x in way.split(" to "))
    tokens = text(5 * G + 30)
    source, target = Fed(one, tokens), Fed(other, tokens, first=5, at=5 * G)
    source.run(5 * G)
    sink, blocks = export(source, 4)
    other.adopt_sink(filed(sink), 5)
    for i, record in enumerate(blocks):
        other.adopt_block(filed(record), 5 + i)
    for i, record in enumerate(blocks):
        assert_same_record(other.export_block(5 + i), record)
    assert_same_record(other.export_sink(5), sink)
    for count in (20, 1, 9):
        assert distance(target.run(count), source.run(count)) < 1e-5
