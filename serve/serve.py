"""`kvarn serve`: bind, listen, load, answer until a signal comes."""

import asyncio
import os
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from kvarn.capacity import MEMORY_FRACTION, Serving, plan_serving
from kvarn.engine import Engine, EngineConfig
from kvarn.errors import BackendError, KvarnError, UsageError
from kvarn.serve.caching import CacheOptions, open_tier
from kvarn.serve.http.app import create_app
from kvarn.serve.http.security import Security
from kvarn.serve.http.service import Limits, Service
from kvarn.serve.loading import Loaded, ModelOptions, load, say, size
from kvarn.tier import NO_TIER, Tier

_LAST_SECONDS = 2.0  # of the shut-down: to send what is cancelled, and to close the connections
_LOOPBACK = {"127.0.0.1", "::1", "localhost"}


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Where to listen, who may ask, and how much at once; checked when built (UsageError)."""

    host: str = "127.0.0.1"
    port: int = 8080
    aliases: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_num_seqs: int = 8
    max_num_batched_tokens: int | None = None
    memory_fraction: float = MEMORY_FRACTION
    max_queue: int = 64
    timeout: float = 600.0
    shutdown_timeout: float = 30.0
    max_body_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        if not 0 < self.memory_fraction <= 1:
            raise UsageError(f"--memory-fraction {self.memory_fraction} is not above 0 and at most 1; use 0.9, say")
        if not 0 <= self.port <= 65535:
            raise UsageError(f"--port {self.port} is not between 0 (any free one) and 65535")
        batched = self.max_num_batched_tokens
        if self.max_num_seqs < 1 or (batched is not None and batched < self.max_num_seqs):
            raise UsageError(
                f"--max-num-batched-tokens {batched} is less than --max-num-seqs {self.max_num_seqs}; "
                "every running sequence needs one token of a step"
            )
        if self.max_queue < 0 or self.timeout <= 0 or self.shutdown_timeout < 0 or self.max_body_bytes < 1:
            raise UsageError("--max-queue, --timeout, --shutdown-timeout and the body limit must not be negative or 0")
        for key in self.api_keys:
            if not key or key != key.strip() or not key.isprintable():
                raise UsageError("an API key is empty, or holds blanks at its ends or control characters; give another")


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys of a file, one a line; empty lines and those that begin with # do not count. UsageError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the key file {path} cannot be read: {error}") from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise UsageError(f"the key file {path} holds no key; write one a line")
    return keys


def serve(model: ModelOptions, cache: CacheOptions, options: ServeOptions) -> None:
    """Serve a model until SIGTERM or SIGINT; returns when everything was answered or cancelled.

    Raises UsageError for a taken port before any weight is read, what `load` raises, and BackendError when the engine
    ended by itself.
    """
    _ = model.preset, model.rope  # what cannot be is refused before anything else
    sock = bind(options.host, options.port)
    url = url_of(sock)
    if options.host not in _LOOPBACK and not options.api_keys:
        say(f"warning: everybody who reaches {options.host} can use this server; set --api-key or KVARN_API_KEY")
    if "*" in options.cors_origins and not options.api_keys:
        say("warning: every web page that you visit can use this server; set --api-key, or name one --cors-origin")
    say(f"listening on {url}, loading {model.model}")
    failure, stuck = asyncio.run(_serve(model, cache, options, sock, url))
    if stuck:  # a thread is still in the framework's code, where the interpreter cannot end it
        if failure is not None:
            say(f"error: {failure}")
        sys.stderr.flush()
        os._exit(0 if failure is None else getattr(failure, "exit_code", 1))
    if failure is not None:
        raise failure


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; UsageError when the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(128)
        except BaseException:
            sock.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot listen on {host} port {port}: {reason}; use another --port or --host") from error
    return sock


def url_of(sock: socket.socket) -> str:
    """Where a browser on this machine finds the socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """Leaves the shut-down's order to us: uvicorn closes the listener first, so that nobody could see `draining`."""

    def __init__(self, config: uvicorn.Config, stop: asyncio.Event) -> None:
        super().__init__(config)
        self._stop = stop
        self._signalled = False
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins to drain, the second ends the process at once."""
        if self._signalled:
            os._exit(128 + sig)
        self._signalled = True
        self._loop.call_soon_threadsafe(self._stop.set)


async def _serve(
    model: ModelOptions, cache: CacheOptions, options: ServeOptions, sock: socket.socket, url: str
) -> tuple[BaseException | None, bool]:
    """Listen, load, answer, drain. What went wrong, and whether a thread is left that cannot be ended."""
    limits = Limits(max_queue=options.max_queue, timeout=options.timeout, max_body_bytes=options.max_body_bytes)
    service = Service(limits)
    security = Security(keys=options.api_keys, cors_origins=options.cors_origins, host=options.host)
    stop = asyncio.Event()
    service.on_failure = stop.set
    config = uvicorn.Config(
        create_app(service, security),
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=75,  # longer than clients keep a connection: else one asks just as it is closed
    )
    server = _Server(config, stop)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    loading = threading.Thread(
        target=_load,
        args=(model, cache, options, url, service, asyncio.get_running_loop()),
        name="kvarn-load",
        daemon=True,
    )
    loading.start()
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if service.status != "failed":
        say("shutting down: finishing what runs; a second signal ends at once")
    await service.drain(max(options.shutdown_timeout - _LAST_SECONDS, 0) if service.status != "failed" else 0)
    server.should_exit = True
    await serving
    stuck = loading.is_alive()
    if service.served is not None:
        ended = await asyncio.to_thread(service.served.runner.shutdown, drain=False, timeout=_LAST_SECONDS / 2)
        stuck = stuck or not ended
        if ended:
            await asyncio.to_thread(service.served.engine.close)
    return service.failure, stuck


def _load(
    model: ModelOptions,
    cache: CacheOptions,
    options: ServeOptions,
    url: str,
    service: Service,
    loop: asyncio.AbstractEventLoop,
) -> None:
    """Load on a thread of its own and open the service, or say why that is impossible."""
    try:
        loaded = load(model, identify=not cache.no_cache)
        engine, serving = build_engine(loaded, model, options, open_tier(loaded, model, cache))
        names = (served_name(model.model, loaded), *options.aliases, model.model)
        for line in describe(loaded, serving, options, url):
            say(line)
        loop.call_soon_threadsafe(service.open, engine, loaded.tokenizer, names)
    except KvarnError as error:
        loop.call_soon_threadsafe(service.fail, error)
    except Exception as error:
        fault = BackendError(f"the model could not be loaded: {type(error).__name__}: {error}")
        fault.__cause__ = error
        loop.call_soon_threadsafe(service.fail, fault)


def served_name(model: str, loaded: Loaded) -> str:
    """The served id: a hub id as it is, else the folder's name."""
    return model if not Path(model).exists() and "/" in model else loaded.model_dir.resolve().name


def build_engine(
    loaded: Loaded, model: ModelOptions, options: ServeOptions, tier: Tier = NO_TIER
) -> tuple[Engine, Serving]:
    """Plan the pools for many sequences, and allocate them. CapacityError when one context does not fit."""
    backend = loaded.backend
    serving = plan_serving(
        backend.info,
        backend.pool_size,
        backend.available_bytes(),
        context=model.ctx_size,
        max_sequences=options.max_num_seqs,
        fraction=options.memory_fraction,
    )
    config = EngineConfig(
        context=serving.context,
        prefill_chunk=model.prefill_chunk,
        token_budget=options.max_num_batched_tokens,
        max_sequences=options.max_num_seqs,
        blocks=serving.blocks,
        slots=serving.slots,
    )
    return Engine(backend, config, tier=tier), serving


def describe(loaded: Loaded, serving: Serving, options: ServeOptions, url: str) -> list[str]:
    """What is served, in lines for the user; device, model and layers stand in the line of `load`."""
    return [
        f"memory: weights {size(loaded.backend.info.weight_bytes)}, KV {size(serving.kv_bytes)} in {serving.blocks} "
        f"blocks and {serving.slots} exact slots for {serving.tokens} tokens",
        f"context: up to {serving.context} tokens ({serving.limit}); {options.max_num_seqs} sequences at once, "
        f"{serving.sequences} of the whole context without preemption",
        f"ready on {url}/v1",
    ]
