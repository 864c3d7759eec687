"""`kvarn run`: one prompt, one answer. The answer goes to standard output, everything else to standard error."""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from kvarn.constraint import ConstraintMaker
from kvarn.engine import Engine
from kvarn.errors import UsageError
from kvarn.identity import tokenizer_identity
from kvarn.request import RequestParams
from kvarn.sampling import SamplingParams
from kvarn.serve.caching import CacheOptions, open_tier
from kvarn.serve.literal import literal
from kvarn.serve.loading import Loaded, ModelOptions, load, progress_bar, say, size, start_engine
from kvarn.serve.models import resolve
from kvarn.serve.schemas import check_schema
from kvarn.serve.sessions import Session, load_session, save_session
from kvarn.serve.structured import Structured
from kvarn.serve.tokenizer import stop_token_ids


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What to ask, and how to print the answer."""

    prompt: str
    system: str | None
    raw: bool
    max_tokens: int
    sampling: SamplingParams
    as_json: bool
    session: str | None = None
    json_schema: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer and its times in seconds."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    prompt_seconds: float
    decode_seconds: float


def run(model: ModelOptions, cache: CacheOptions, options: RunOptions) -> None:
    """Load, answer, report."""
    schema = read_schema(options.json_schema) if options.json_schema else None
    tokenizer = tokenizer_identity(resolve(model.model, progress=progress_bar())) if options.session else ""
    session = load_session(options.session, tokenizer) if options.session else None
    if session is not None and not session.tokens:  # kvarn chat leaves one behind after /clear
        session = None
    loaded = load(model, identify=not cache.no_cache)
    prompt = encode_prompt(loaded, options, session)
    structured = Structured(loaded.tokenizer, loaded.backend.info.vocab_size)
    constraint = None if schema is None else structured.json_schema(schema)
    engine, _ = start_engine(loaded, model, open_tier(loaded, model, cache))
    try:
        answer = generate(loaded, engine, prompt, options, constraint)
    finally:
        engine.close()
    if options.session is not None:
        turn = (len(session.tokens) if session else 0, len(prompt))
        before = session or Session(tokens=(), tokenizer=tokenizer, system=None if options.raw else options.system)
        tokens = (*prompt, *answer.tokens)
        save_session(options.session, replace(before, tokens=tokens, turns=(*before.turns, *turn)))
    report = _report(loaded, engine, answer)
    if options.as_json:
        click.echo(json.dumps(report, ensure_ascii=False))
    kv, timing = report["kv"], report["timing"]
    reused = f", {answer.num_cached_tokens} of them reused" if answer.num_cached_tokens else ""
    say(
        f"prompt {answer.num_prompt_tokens} tokens at {timing['prompt_tokens_per_s']:.1f}/s{reused}, "
        f"answer {answer.num_completion_tokens} tokens at {timing['decode_tokens_per_s']:.1f}/s "
        f"({answer.finish_reason}); peak memory {size(report['memory']['peak_bytes'])}; "
        f"KV held {size(kv['bytes_held'])} (the same tokens exact: {size(kv['bytes_exact'])})"
    )


def encode_prompt(loaded: Loaded, options: RunOptions, session: Session | None = None) -> list[int]:
    """The prompt's token ids, in the model's chat template unless there is none or `raw` is set; after a session's."""
    tokenizer = loaded.tokenizer
    if session is not None and options.system is not None:
        raise UsageError("--system belongs to the beginning of a session; leave it out, or take another --session name")
    if options.raw or not tokenizer.has_chat_template:
        if options.system is not None:
            say("--system is not used: " + ("--raw was given" if options.raw else "the model has no chat template"))
        if session is not None:
            return [*session.tokens, *tokenizer.encode_more(options.prompt)]
        return tokenizer.encode(options.prompt)
    if session is not None:
        return [*session.tokens, *tokenizer.encode_next_turn(options.prompt)]
    messages = [{"role": "user", "content": options.prompt}]
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": options.system})
    return loaded.tokenizer.encode_chat(messages)


def read_schema(path: Path) -> Any:
    """A file's JSON schema; UsageError for a file that is none, or a schema that is not supported."""
    try:
        schema = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"the JSON schema in {path} cannot be read: {error}") from error
    if not isinstance(schema, Mapping | bool):
        raise UsageError(f"the JSON schema in {path} must be an object, and begins as {json.dumps(schema)[:64]}")
    check_schema(schema)
    return schema


def generate(
    loaded: Loaded, engine: Engine, prompt: list[int], options: RunOptions, constraint: ConstraintMaker | None = None
) -> Answer:
    """Run one request; its text streams to standard output unless JSON was asked for."""
    params = RequestParams(
        prompt=tuple(prompt),
        max_tokens=options.max_tokens,
        sampling=options.sampling,
        stop_token_ids=stop_token_ids(loaded.backend.info, loaded.tokenizer),
        text=loaded.tokenizer.stream,
        constraint=constraint,
    )
    text = ""
    tokens: list[int] = []
    start = time.perf_counter()
    first = last = start
    finish_reason, cached = "length", 0
    for event in engine.stream(params):
        last = time.perf_counter()
        if event.token is None and event.finish_reason is None:
            _prefill_progress(event.request.num_computed_tokens, len(prompt))
            continue
        cached = event.request.num_cached_tokens
        if not tokens:
            first = last
        if event.token is not None:
            tokens.append(event.token)
        text += event.text
        _print(event.text, options)
        finish_reason = event.finish_reason or finish_reason
    if not options.as_json:
        click.echo()
    return Answer(
        text=text,
        tokens=tuple(tokens),
        finish_reason=finish_reason,
        num_prompt_tokens=len(prompt),
        num_cached_tokens=cached,
        num_completion_tokens=len(tokens),
        prompt_seconds=first - start,
        decode_seconds=last - first,
    )


def _print(text: str, options: RunOptions) -> None:
    if text and not options.as_json:
        # Without `color`, click would take escape codes out of what goes to a pipe.
        click.echo(literal(text) if sys.stdout.isatty() else text, nl=False, color=True)
        sys.stdout.flush()


def _prefill_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        click.echo(f"\rkvarn: reading {done} of {total} tokens\x1b[K\r", nl=False, err=True)


def _report(loaded: Loaded, engine: Engine, answer: Answer) -> Mapping[str, Any]:
    info = loaded.backend.info
    # The last generated token was never run, so it has no keys and values.
    tokens = answer.num_prompt_tokens + max(answer.num_completion_tokens - (answer.finish_reason != "stop"), 0)
    decoded = answer.num_completion_tokens - 1 + (answer.finish_reason == "stop")
    return {
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "usage": {
            "prompt_tokens": answer.num_prompt_tokens,
            "cached_tokens": answer.num_cached_tokens,
            "completion_tokens": answer.num_completion_tokens,
        },
        "timing": {
            "load_s": loaded.load_seconds,
            "prompt_s": answer.prompt_seconds,
            "decode_s": answer.decode_seconds,
            "prompt_tokens_per_s": _rate(answer.num_prompt_tokens, answer.prompt_seconds),
            "decode_tokens_per_s": _rate(decoded, answer.decode_seconds),
        },
        "kv": {
            "dtype": info.plan.name,
            "bytes_held": engine.peak_bytes_held,
            "bytes_exact": tokens * info.exact_bytes_per_token,
            "bytes_allocated": engine.memory.blocks + engine.memory.slots,
            "layers_sealed": len(info.plan.sealed),
            "layers": len(info.plan.layers),
        },
        "cache": engine.cache_report(),
        "memory": {"weight_bytes": info.weight_bytes, "peak_bytes": loaded.backend.peak_bytes()},
        "backend": loaded.backend_name,
        "device": info.device,
    }


def _rate(count: int, seconds: float) -> float:
    return max(count, 0) / seconds if seconds > 0 else 0.0
