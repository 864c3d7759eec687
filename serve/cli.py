"""The command line: options and their checks. What a command does stands in its own file."""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from kvarn import __version__
from kvarn.errors import KvarnError, UsageError
from kvarn.serve.loading import ModelOptions, progress_bar, say

if TYPE_CHECKING:
    from kvarn.sampling import SamplingParams
    from kvarn.serve.caching import CacheOptions

SAMPLING = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "seed": "seed"}
F = TypeVar("F", bound=Callable[..., Any])


class _Group(click.Group):
    """Turns our own errors into one line on standard error and their exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KvarnError as error:
            say(f"error: {error}")
            ctx.exit(error.exit_code)


# Threads of torch that wait for each other spin by default, and when another program uses a core they do little else:
# on two busy cores a decode step took ten times as long. libgomp reads this when torch is loaded, which is later.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvarn")
def main() -> None:
    """Serve language models with a KV cache a quarter to a fifth of the usual size."""


def _model_options(command: F) -> F:
    for option in reversed(
        [
            click.option("--backend", default="auto", show_default=True, help="auto, mlx or triton (torch)."),
            click.option(
                "--kv-cache-dtype",
                default="kvarn",
                show_default=True,
                metavar="NAME",
                help="kvarn (= kvarn_k4v2_g128), kvarn_k<bits>v<bits>_g<tile>, or exact.",
            ),
            click.option("-c", "--ctx-size", type=int, help="Context in tokens; default: the model's, if it fits."),
            click.option(
                "--prefill-chunk",
                type=click.IntRange(min=1),
                default=512,
                show_default=True,
                help="Prompt tokens per step.",
            ),
            click.option("--dtype", default="auto", show_default=True, help="auto, float32, float16 or bfloat16."),
            click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, ..."),
            click.option("--adapter", type=click.Path(path_type=Path), help="Folder of a LoRA adapter (peft, mlx-lm)."),
            click.option("--rope-scaling", metavar="KIND:FACTOR", help="linear:4, yarn:4, llama3:8, none, or JSON."),
            click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead."),
        ]
    ):
        command = option(command)
    return command


def _sampling_options(command: F) -> F:
    for option in reversed(
        [
            click.option("--temp", type=float, default=0.0, show_default=True, help="Temperature; 0 is greedy."),
            click.option("--top-p", type=float, default=1.0, show_default=True),
            click.option("--top-k", type=int, default=0, show_default=True, help="0 means all tokens."),
            click.option("--min-p", type=float, default=0.0, show_default=True),
            click.option("--seed", type=int, default=0, show_default=True),
        ]
    ):
        command = option(command)
    return command


def _sampling(options: dict[str, Any]) -> "SamplingParams":
    """Take the sampling options out of a command's."""
    from kvarn.sampling import SamplingParams

    return SamplingParams(**{field: options.pop(name) for name, field in SAMPLING.items()})


def _cache_options(command: F) -> F:
    for option in reversed(
        [
            click.option("--cache-dir", type=click.Path(path_type=Path), help="Folder of the disk cache."),
            click.option("--cache-size", metavar="SIZE", help="Most bytes of the disk cache, like 4GiB."),
            click.option("--no-cache", is_flag=True, help="Neither read nor write the disk cache."),
        ]
    ):
        command = option(command)
    return command


def _cache(options: dict[str, Any]) -> "CacheOptions":
    """Take the cache's options out of a command's."""
    from kvarn.serve.caching import CacheOptions

    return CacheOptions(**{name: options.pop(name) for name in ("cache_dir", "cache_size", "no_cache")})


def _model(model: str, options: dict[str, Any]) -> ModelOptions:
    return ModelOptions(model=model, **options)


@main.command()
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("-p", "--prompt", "prompt_option", metavar="TEXT", help="The prompt, instead of the argument.")
@click.option("-f", "--file", "file", type=click.Path(path_type=Path), help="Read the prompt from a file.")
@click.option("-s", "--system", help="The system prompt.")
@click.option("--raw", is_flag=True, help="Use the prompt as it is, without the model's chat template.")
@click.option("-n", "--max-tokens", type=click.IntRange(min=1), default=512, show_default=True)
@click.option("--json-schema", type=click.Path(path_type=Path), help="A file: the answer is JSON that it accepts.")
@_sampling_options
@click.option("--session", metavar="NAME", help="Go on with this conversation, and keep it under this name.")
@_cache_options
@_model_options
def run(
    model: str,
    prompt: str | None,
    prompt_option: str | None,
    file: Path | None,
    system: str | None,
    raw: bool,
    max_tokens: int,
    json_schema: Path | None,
    session: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Answer one prompt with MODEL: `demo`, a model folder, or a hub id.

    The prompt comes from the argument, -p, -f or standard input. The answer alone goes to standard output.
    """
    from kvarn.serve.run import RunOptions
    from kvarn.serve.run import run as run_model

    sampling = _sampling(options)
    text = _one_prompt(prompt, prompt_option, file)
    asked = RunOptions(
        prompt=text,
        system=system,
        raw=raw,
        max_tokens=max_tokens,
        sampling=sampling,
        as_json=as_json,
        session=session,
        json_schema=json_schema,
    )
    cache = _cache(options)
    run_model(_model(model, options), cache, asked)


@main.command()
@click.argument("model", required=False)
@click.option("-s", "--system", help="The system prompt.")
@click.option("-n", "--max-tokens", type=click.IntRange(min=1), default=512, show_default=True)
@_sampling_options
@click.option("--session", metavar="NAME", help="Go on with this conversation, and keep it under this name.")
@click.option("--url", metavar="URL", help="Talk with this server instead, like http://127.0.0.1:8080.")
@click.option("--api-key", envvar="KVARN_API_KEY", metavar="KEY", help="The server's key.")
@_cache_options
@_model_options
def chat(
    model: str | None,
    system: str | None,
    max_tokens: int,
    session: str | None,
    url: str | None,
    api_key: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Talk with MODEL in the terminal: `demo`, a model folder, or a hub id. /help lists the commands.

    With --url, MODEL is a name that the server knows; without it, the server's first model. When standard input is no
    terminal, each line is a message and the answers alone go to standard output.
    """
    if as_json:
        raise UsageError("chat prints no JSON object; use kvarn run --json")
    if url is not None:
        context = click.get_current_context()
        loading = [name for name in options if name not in SAMPLING]
        given = [name for name in loading if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if given:
            raise UsageError(f"--{given[0].replace('_', '-')} is the server's choice; leave it out with --url")
    elif model is None:
        raise UsageError("no model; name one (demo, a folder, a hub id), or a server with --url")
    from kvarn.serve.chat.chat import ChatOptions, chat_with_server
    from kvarn.serve.chat.chat import chat as chat_with_model
    from kvarn.serve.chat.settings import Settings

    sampling = _sampling(options)
    asked = ChatOptions(settings=Settings(sampling=sampling, max_tokens=max_tokens), system=system, session=session)
    if url is not None:
        chat_with_server(url, api_key, model, asked)
    elif model is not None:
        cache = _cache(options)
        chat_with_model(_model(model, options), cache, asked)


def _one_prompt(argument: str | None, option: str | None, file: Path | None) -> str:
    """The prompt from its one source; UsageError when there are several or none."""
    given = [x for x in (argument, option, file) if x is not None]
    if len(given) > 1:
        raise UsageError("the prompt is given more than once; use one of the argument, -p and -f")
    if not given:
        if sys.stdin.isatty():
            raise UsageError("no prompt; give it as an argument, with -p, with -f FILE, or on standard input")
        text = sys.stdin.read()
    elif isinstance(given[0], Path):
        try:
            text = given[0].read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"the prompt file {given[0]} cannot be read: {error}") from error
    else:
        text = given[0]
    if not text:
        raise UsageError("the prompt is empty; give at least one character")
    return text


@main.command()
@click.argument("model")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--against", metavar="NAME", help="Also compare with this cache dtype: exact, or a preset.")
@click.option("-n", "--max-tokens", type=click.IntRange(min=2), help="Use only the first tokens of the file.")
@_model_options
def ppl(model: str, file: Path, against: str | None, max_tokens: int | None, as_json: bool, **options: Any) -> None:
    """Perplexity of FILE under MODEL, in windows of --ctx-size tokens (default: 2048, or the model's context).

    With --against, also the KL divergence per token from the other cache's predictions.
    """
    from kvarn.serve.ppl import ppl as run_ppl

    run_ppl(_model(model, options), file, against=against, max_tokens=max_tokens, as_json=as_json)


@main.command()
@click.argument("model")
@click.option("--kv-cache-dtype", default="kvarn", show_default=True, metavar="NAME", help="A preset, or exact.")
@click.option("-c", "--ctx-size", type=int, help="Context in tokens; default: the model's, if it fits.")
@click.option("--memory", metavar="SIZE", help="Memory to plan for, like 24GiB; default: what is free here.")
@click.option("--max-num-seqs", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--dtype", default="auto", show_default=True, help="auto, float32, float16 or bfloat16.")
@click.option("--rope-scaling", metavar="KIND:FACTOR", help="linear:4, yarn:4, llama3:8, none, or JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def estimate(
    model: str,
    kv_cache_dtype: str,
    ctx_size: int | None,
    memory: str | None,
    max_num_seqs: int,
    dtype: str,
    rope_scaling: str | None,
    as_json: bool,
) -> None:
    """What MODEL takes and what fits, with this cache and with an exact one; nothing is loaded."""
    from kvarn.serve.estimate import estimate as run_estimate
    from kvarn.serve.estimate import parse_bytes

    options = ModelOptions(model=model, kv_cache_dtype=kv_cache_dtype, rope_scaling=rope_scaling)
    run_estimate(
        model,
        options.preset,
        memory=None if memory is None else parse_bytes(memory),
        context=ctx_size,
        max_sequences=max_num_seqs,
        dtype=dtype,
        rope=options.rope,
        as_json=as_json,
    )


@main.command()
@click.argument("model")
@click.option("--contexts", default="", metavar="N,...", help="Tokens of a sequence at its end; default: 512,4096.")
@click.option("--batch", default="1,4", show_default=True, metavar="N,...", help="Sequences at once.")
@click.option("--tokens", default=32, show_default=True, help="Decode steps to measure in each run.")
@click.option("--repeat", default=3, show_default=True, help="Runs of each size and cache, after one to warm up.")
@click.option(
    "--kv-cache-dtype", "caches", default="exact,kvarn", show_default=True, metavar="NAME,...", help="exact or presets."
)
@click.option("--backend", default="auto", show_default=True, help="auto, mlx or triton (torch).")
@click.option("--prefill-chunk", type=click.IntRange(min=1), default=512, show_default=True)
@click.option("--dtype", default="auto", show_default=True, help="auto, float32, float16 or bfloat16.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, ...")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Also draw an SVG into this file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def bench(
    model: str,
    contexts: str,
    batch: str,
    tokens: int,
    repeat: int,
    caches: str,
    plot: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """How fast MODEL reads prompts and decodes, by context and batch, exact against KVarN; and the bytes each holds.

    All caches are measured in turns, in one process over the same weights. The disk cache takes no part.
    """
    from kvarn.serve.bench import BenchOptions
    from kvarn.serve.bench import bench as run_bench

    asked = BenchOptions(
        caches=tuple(name.strip() for name in caches.split(",")),
        contexts=_numbers("--contexts", contexts),
        batches=_numbers("--batch", batch),
        tokens=tokens,
        repeat=repeat,
        plot=plot,
    )
    run_bench(_model(model, {**options, "kv_cache_dtype": asked.caches[0]}), asked, as_json=as_json)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """`1,4` -> (1, 4)."""
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise UsageError(f"{option} {text!r} is not a list of whole numbers; write them like 1,4") from None


@main.group()
def cache() -> None:
    """The disk cache: what it holds, why a prompt hits or misses, check it, shrink it."""


def _cache_command(command: Callable[..., None]) -> Callable[..., None]:
    """A command of `kvarn cache`: it gets the cache's options as one object."""

    @functools.wraps(command)
    def with_options(cache_dir: Path | None, cache_size: str | None, **options: Any) -> None:
        from kvarn.serve.caching import CacheOptions

        command(CacheOptions(cache_dir=cache_dir, cache_size=cache_size), **options)

    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON instead."),
        click.option("--cache-size", metavar="SIZE", help="Most bytes of the disk cache, like 4GiB."),
        click.option("--cache-dir", type=click.Path(path_type=Path), help="Folder of the disk cache."),
    ):
        with_options = option(with_options)
    return with_options


@cache.command()
@_cache_command
def status(options: "CacheOptions", as_json: bool) -> None:
    """Folder, budget, what is held and for which models."""
    from kvarn.serve import cache as commands

    commands.status(options, as_json=as_json)


@cache.command()
@_cache_command
def ls(options: "CacheOptions", as_json: bool) -> None:
    """Every block, the most recently used first."""
    from kvarn.serve import cache as commands

    commands.ls(options, as_json=as_json)


@cache.command()
@_cache_command
def verify(options: "CacheOptions", as_json: bool) -> None:
    """Read and check every block; damaged ones go to quarantine."""
    from kvarn.serve import cache as commands

    commands.verify(options, as_json=as_json)


@cache.command()
@_cache_command
def clear(options: "CacheOptions", as_json: bool) -> None:
    """Remove every block; files that KVarN did not write stay."""
    from kvarn.serve import cache as commands

    commands.clear(options, as_json=as_json)


@cache.command()
@click.option("--to", metavar="SIZE", help="Bytes to keep; default: the budget.")
@_cache_command
def prune(options: "CacheOptions", to: str | None, as_json: bool) -> None:
    """Evict the least recently used blocks."""
    from kvarn.serve import cache as commands

    commands.prune(options, to, as_json=as_json)


@cache.command()
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("-f", "--file", "file", type=click.Path(path_type=Path), help="Read the prompt from a file.")
@click.option("--raw", is_flag=True, help="Use the prompt as it is, without the model's chat template.")
@_cache_options
@_model_options
def explain(model: str, prompt: str | None, file: Path | None, raw: bool, as_json: bool, **options: Any) -> None:
    """What MODEL's blocks are named by, and how far PROMPT is stored."""
    from kvarn.serve import cache as commands

    text = _one_prompt(prompt, None, file) if prompt is not None or file is not None else None
    where = _cache(options)
    commands.explain(_model(model, options), where, text, raw=raw, as_json=as_json)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def doctor(as_json: bool) -> None:
    """This machine, the versions, and every operation of every backend against the oracle: PASS or FAIL."""
    from kvarn.serve.doctor import doctor as run_doctor

    run_doctor(as_json=as_json)


@main.command()
@click.argument("model")
def pull(model: str) -> None:
    """Bring MODEL (`demo` or a hub id) to this machine and print its folder."""
    from kvarn.serve.models import resolve

    click.echo(resolve(model, progress=progress_bar()))


@main.command()
@click.argument("model")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0: any free one.")
@click.option("--alias", "aliases", multiple=True, metavar="NAME", help="Another name for the model; repeatable.")
@click.option(
    "--api-key", "api_keys", multiple=True, envvar="KVARN_API_KEY", metavar="KEY", help="Who may ask; repeatable."
)
@click.option("--api-key-file", type=click.Path(path_type=Path), help="A file with one key a line.")
@click.option("--cors-origin", "cors_origins", multiple=True, metavar="ORIGIN", help="A web page that may ask.")
@click.option("--max-num-seqs", type=click.IntRange(min=1), default=8, show_default=True, help="Sequences at once.")
@click.option("--max-num-batched-tokens", type=click.IntRange(min=1), help="Tokens of one step, of all sequences.")
@click.option("--memory-fraction", type=float, default=0.9, show_default=True, help="Of what is free, for the cache.")
@click.option("--max-queue", type=click.IntRange(min=0), default=64, show_default=True, help="Answers that may wait.")
@click.option("--timeout", type=float, default=600.0, show_default=True, help="Seconds that one request may take.")
@click.option("--shutdown-timeout", type=float, default=30.0, show_default=True, help="Seconds to finish what runs.")
@click.option("--max-body-mib", type=click.IntRange(min=1), default=16, show_default=True, help="Size of a request.")
@_cache_options
@_model_options
def serve(
    model: str, api_keys: tuple[str, ...], api_key_file: Path | None, max_body_mib: int, as_json: bool, **options: Any
) -> None:
    """Serve MODEL over HTTP with OpenAI's API, until SIGTERM or Ctrl-C."""
    from kvarn.serve.serve import ServeOptions, read_keys
    from kvarn.serve.serve import serve as run_serve

    if as_json:
        raise UsageError("serve prints no JSON object; read /metrics and /v1/cache instead")
    keys = (*api_keys, *(read_keys(api_key_file) if api_key_file else ()))
    cache = _cache(options)
    named = {field.name for field in dataclasses.fields(ModelOptions)} & set(options)
    model_options = {name: options.pop(name) for name in named}
    asked = ServeOptions(api_keys=keys, max_body_bytes=max_body_mib << 20, **options)
    run_serve(_model(model, model_options), cache, asked)


if __name__ == "__main__":
    main()
