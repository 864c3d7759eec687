"""`kvarn cache`: what the disk cache holds, why a prompt hits or misses, and how to check and shrink it."""

import json
import time
from collections.abc import Sequence
from typing import Any

import click

from kvarn.cache_explain import Reach, differences, reach
from kvarn.errors import KvarnError
from kvarn.serve.caching import CacheOptions, describe_root, fingerprint
from kvarn.serve.estimate import parse_bytes
from kvarn.serve.loading import ModelOptions, load, size
from kvarn.store_disk import DiskStore


class DamagedCacheError(KvarnError):
    """`verify` found damaged blocks."""


def _open(options: CacheOptions, ours: bytes = b"") -> DiskStore:
    """The store, with a budget that evicts nothing: these commands only look, unless they say otherwise."""
    return DiskStore(options.folder, 1 << 62, fingerprint=ours)


def status(options: CacheOptions, *, as_json: bool) -> None:
    """Folder, budget, what is held and for which models."""
    budget, why = options.budget()
    store = _open(options)
    stats, texts = store.stats(), store.descriptions()
    roots: list[dict[str, Any]] = [
        {
            "fingerprint": root.hex(),
            "what": describe_root(texts.get(root, "")),
            "blocks": part.blocks,
            "bytes": part.bytes,
            "used": part.used,
        }
        for root, part in sorted(stats.fingerprints.items(), key=lambda x: -x[1].used)
    ]
    store.close()
    if as_json:
        report = {"folder": str(store.folder), "budget_bytes": budget, "budget": why, "blocks": stats.blocks}
        report |= {"block_bytes": stats.block_bytes, "total_bytes": stats.total_bytes}
        click.echo(json.dumps(report | {"quarantined": stats.quarantined, "fingerprints": roots}))
        return
    click.echo(f"folder: {store.folder}")
    click.echo(f"budget: {size(budget)} ({why})")
    click.echo(f"held: {stats.blocks} blocks, {size(stats.total_bytes)} in all; {stats.quarantined} in quarantine")
    for root in roots:
        click.echo(
            f"  {root['fingerprint'][:12]}  {root['blocks']} blocks, {size(root['bytes'])}, "
            f"last used {_ago(root['used'])}: {root['what']}"
        )


def ls(options: CacheOptions, *, as_json: bool) -> None:
    """Every block, the most recently used first."""
    store = _open(options)
    entries = list(reversed(store.entries()))
    store.close()
    if as_json:
        for entry in entries:
            click.echo(json.dumps({k: v.hex() if isinstance(v, bytes) else v for k, v in vars(entry).items()}))
        return
    for entry in entries:
        click.echo(
            f"{entry.key.hex()[:12]}  after {entry.parent.hex()[:12]}  {entry.num_tokens} tokens  "
            f"{size(entry.size)}  used {_ago(entry.used)}  of {entry.fingerprint.hex()[:12]}"
        )


def verify(options: CacheOptions, *, as_json: bool) -> None:
    """Read and check every block; damaged ones go to quarantine. Leaves with an error when there were any."""
    store = _open(options)
    report = store.verify()
    store.close()
    bad = {key.hex(): reason for key, reason in (report.bad | report.unreadable).items()}
    if as_json:
        click.echo(json.dumps({"good": report.good, "bad": bad}))
    else:
        click.echo(f"{report.good} blocks are good, {len(bad)} are not")
        for key, reason in bad.items():
            click.echo(f"  {key[:12]}: {reason}")
    if bad:
        raise DamagedCacheError(f"{len(bad)} blocks were damaged; they are in quarantine and will be computed again")


def clear(options: CacheOptions, *, as_json: bool) -> None:
    """Remove everything that is ours."""
    store = _open(options)
    freed = store.clear()
    store.close()
    click.echo(json.dumps({"freed_bytes": freed}) if as_json else f"freed {size(freed)}")


def prune(options: CacheOptions, to: str | None, *, as_json: bool) -> None:
    """Evict the least recently used down to a size, by default the budget."""
    target = options.budget()[0] if to is None else parse_bytes(to)
    store = _open(options)
    freed = store.prune(target)
    held = store.stats().total_bytes
    store.close()
    if as_json:
        click.echo(json.dumps({"freed_bytes": freed, "total_bytes": held}))
    else:
        click.echo(f"freed {size(freed)}; {size(held)} are held")


def explain(model: ModelOptions, options: CacheOptions, prompt: str | None, *, raw: bool, as_json: bool) -> None:
    """The parts of a model's fingerprint, how others in store differ, and how far a prompt is stored."""
    loaded = load(model, identify=True)
    found = fingerprint(loaded, model)
    root = found.root()
    store = _open(options, root)
    stats, texts = store.stats(), store.descriptions()
    mine = stats.fingerprints.get(root)
    others = {
        other.hex(): differences(found.text(), texts[other]) if other in texts else ["its description is lost"]
        for other in stats.fingerprints
        if other != root
    }
    how_far: Reach | None = None
    tokens: Sequence[int] = ()
    if prompt is not None:
        plain = raw or not loaded.tokenizer.has_chat_template
        message = [{"role": "user", "content": prompt}]
        tokens = loaded.tokenizer.encode(prompt) if plain else loaded.tokenizer.encode_chat(message)
        how_far = reach(store, root, tokens, loaded.backend.info.plan.tile_tokens)
    store.close()
    if as_json:
        report: dict[str, Any] = {"fingerprint": root.hex(), "parts": json.loads(found.text())}
        report |= {"blocks": mine.blocks if mine else 0, "others": others}
        report |= {"prompt": vars(how_far) | {"tokens": len(tokens)} if how_far else None}
        click.echo(json.dumps(report))
        return
    click.echo(f"fingerprint {root.hex()}: {mine.blocks if mine else 0} blocks in store")
    for name, value in json.loads(found.text()).items():
        text = json.dumps(value)
        click.echo(f"  {name}: {text if len(text) < 100 else text[:97] + '...'}")
    for other, parts in others.items():
        click.echo(f"other fingerprint {other[:12]} in store, which can never hit here:")
        for part in parts:
            click.echo(f"  {part}")
    if how_far is not None:
        _print_reach(how_far, tokens, loaded.tokenizer.decode)


def _print_reach(how_far: Reach, tokens: Sequence[int], decode: Any) -> None:
    click.echo(
        f"prompt of {len(tokens)} tokens: {how_far.tiles} whole tiles in store, "
        f"{how_far.reusable_tokens} tokens would not be computed again"
    )
    if how_far.diverges_at is None:
        click.echo("  nothing in store goes on from there")
        return
    stored = f"token {how_far.stored} ({decode([how_far.stored])!r})"
    if how_far.wanted is None:
        click.echo(f"  the prompt ends at token {how_far.diverges_at}, where the nearest stored text has {stored}")
    else:
        click.echo(
            f"  first difference from the nearest stored text: token {how_far.diverges_at} is {how_far.wanted} "
            f"({decode([how_far.wanted])!r}), stored is {stored}"
        )


def _ago(moment: float) -> str:
    seconds = max(time.time() - moment, 0)
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit} ago"
    return f"{seconds:.0f} seconds ago"
