"""Figures for people: what an answer took, and what the prefix cache holds and saved."""

from collections.abc import Mapping
from typing import Any

from kvarn.serve.chat.talk import Outcome
from kvarn.serve.loading import size


def outcome_lines(outcome: Outcome) -> list[str]:
    """What the last answer took."""
    lines = []
    if outcome.num_prompt_tokens is not None:
        cached = "" if outcome.num_cached_tokens is None else f", {outcome.num_cached_tokens} of them cached"
        lines.append(
            f"prompt: {outcome.num_prompt_tokens} tokens in {outcome.prompt_seconds:.2f} s{cached}"
            + _rate(outcome.num_prompt_tokens, outcome.prompt_seconds)
        )
    count = outcome.num_completion_tokens
    if count is None:
        lines.append(f"answer: {outcome.decode_seconds:.2f} s; the server did not count its tokens")
    else:
        # The first token comes with the prompt.
        rate = _rate(count - 1 + (outcome.finish_reason == "stop"), outcome.decode_seconds)
        lines.append(f"answer: {count} tokens in {outcome.decode_seconds:.2f} s ({outcome.finish_reason}){rate}")
    return lines


def _rate(count: int, seconds: float) -> str:
    return f", {count / seconds:.1f} tokens/s" if count > 0 and seconds > 0 else ""


def cache_lines(report: Mapping[str, Any]) -> list[str]:
    """Engine.cache_report() in lines."""
    memory, tokens, disk = report["memory"], report["tokens"], report["disk"]
    saved = tokens["from_memory"] + tokens["from_disk"]
    lines = [
        f"memory: {memory['tiles']} tiles are kept; {size(memory['bytes_allocated'])} are allocated",
        f"prompts: {saved} tokens were not computed again ({tokens['from_memory']} from memory, "
        f"{tokens['from_disk']} from disk); {tokens['computed']} were computed",
    ]
    if not disk:
        return [*lines, "disk: off"]
    misses = ", ".join(f"{count} {reason}" for reason, count in sorted(disk["misses"].items()) if count) or "none"
    return [
        *lines,
        f"disk: {disk['tiles_restored']} tiles restored, {disk['tiles_written']} written, "
        f"{disk['tiles_dropped']} dropped, {disk['tiles_failed']} failed; misses: {misses}",
    ]
