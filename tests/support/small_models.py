"""Small models with random weights, made with transformers, and sequences that run through a backend step by step."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.utils import logging

from kvarn.backend import Backend
from kvarn.step import SamplingRow, Span, StepPlan, StepResult
from kvarn.visibility import completed_tiles

Logits = NDArray[np.float32]

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 1),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "mlp_dim"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "context_length"), 1024),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 32),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "mamba_n_groups"), 1),
    **{"vocab_size": 256, "head_dim": 64, "kv_channels": 64, "v_head_dim": 64, "num_experts_per_tok": 2},
    **{"sliding_window": None, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
THETA = {"rope_type": "default", "rope_theta": 50_000.0}


@dataclass
class Fed:
    """One sequence on its way through a backend: it owns the slots and blocks from `first` on, or those named."""

    backend: Backend
    tokens: tuple[int, ...]
    first: int = 0
    at: int = 0
    slots: Sequence[int] = ()
    blocks: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.slots = self.slots or range(self.first, self.first + 100)
        self.blocks = self.blocks or range(self.first, self.first + 100)

    def span(self, count: int, want: Any = "all", sampling: SamplingRow | None = None) -> Span:
        """The next `count` tokens."""
        plan = self.backend.info.plan
        start, stop = self.at, min(self.at + count, len(self.tokens))
        self.at, g = stop, plan.tile_tokens
        last, sealed = (stop - 1) // g, plan.preset is not None
        before, new = len(completed_tiles(0, start, g)), len(completed_tiles(start, stop, g))
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
        (logits,) = run(self.backend, self.span(count))
        assert np.isfinite(logits).all(), "garbage was read"
        return logits

    def feed(self, chunk: int) -> Logits:
        """Run all that is left in chunks."""
        return np.concatenate([self.run(chunk) for _ in range(self.at, len(self.tokens), chunk)])


def step(backend: Backend, *spans: Span) -> StepResult:
    result = backend.run(StepPlan(spans=spans))
    assert result.failures == ()
    return result


def run(backend: Backend, *spans: Span) -> list[Logits]:
    logits = [output.logits for output in step(backend, *spans).outputs]
    return [x for x in logits if x is not None]


def feed(backend: Backend, tokens: tuple[int, ...], chunk: int) -> Logits:
    """The logits of a whole prompt in chunks, in pools of its own."""
    backend.allocate(12, 12)
    return Fed(backend, tokens).feed(chunk)


def distance(got: Logits, want: Logits) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, 250, length).tolist())


def build(folder: Path, model_type: str, extra: Mapping[str, Any] | None = None, **config: Any) -> Any:
    """A transformers model with random weights from a fixed seed, saved to `folder`; `extra` goes to config.json."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    cls = CONFIG_MAPPING[model_type]
    known = {f.name for f in dataclasses.fields(cls)} | set(cls.attribute_map)
    mapped = {cls.attribute_map.get(k, k): v for k, v in SMALL.items() if k in known}
    if "rope_parameters" in known:
        mapped["rope_parameters"] = dict(THETA)
    made = cls(**{**{k: v for k, v in mapped.items() if k in known}, **config})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.02) if p.ndim < 2 else p.normal_(0, p.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    edit(folder, **(extra or {}))
    return model


def edit(folder: Path, **changes: Any) -> Path:
    """Change fields of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder
