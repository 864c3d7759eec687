"""Many clients against a real server: some hang up, some send rubbish, and every answer that survives must be right.

Starts `kvarn serve MODEL` on a free port, asks every case alone, then lets the clients loose for --seconds or
--requests, and prints what came of it: the codes, the answers that differ from those given alone, the blocks and slots
that are still held when all is quiet (must be 0), and the server's memory over time. Exit code 1 if anything is wrong.
"""

import argparse
import asyncio
import contextlib
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

WORDS = "the river ran past old stone houses and nobody had seen so much water before"
RUBBISH: list[Any] = [
    b"\xff\x00",
    b"{",
    b"[" * 5000,
    {"model": "demo"},
    {"model": "nobody", "prompt": "x"},
    {"model": "demo", "prompt": [10**9]},
    {"model": "demo", "prompt": "x" * 100_000},
    {"model": "demo", "prompt": "x", "n": 10**6},
    {"model": "demo", "prompt": "x", "logit_bias": {"99999999": 1}},
    {"model": "demo", "prompt": "\ud800", "temperature": "warm"},
]


@dataclass
class Tally:
    """What the clients saw."""

    codes: Counter[str] = field(default_factory=Counter)
    right: int = 0
    wrong: list[str] = field(default_factory=list)
    hung_up: int = 0
    rubbish: int = 0
    sent: int = 0


def make_cases(count: int, most_tokens: int, model: str, rng: random.Random) -> list[dict[str, Any]]:
    """Prompts of mixed lengths, greedy and seeded, some with two answers."""
    cases = []
    for i in range(count):
        words = rng.choices(WORDS.split(), k=rng.choice([3, 20, 60, 140, 280]))
        case = {"model": model, "prompt": " ".join(words), "max_tokens": rng.randint(2, most_tokens), "seed": i}
        cases.append({**case, "temperature": 0 if i % 3 else 0.7, "n": 2 if i % 5 == 4 else 1})
    return cases


@contextlib.contextmanager
def server(model: str, args: list[str]) -> Iterator[tuple[str, psutil.Process]]:
    """A running server: its address and its process."""
    command = [sys.executable, "-m", "kvarn.serve.cli", "serve", model, "--port", "0", "--no-cache", *args]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = None
        for line in process.stderr:
            print(line.rstrip())
            if found := re.search(r"ready on (http://\S+)/v1", line):
                url = found[1]
                break
        if url is None:
            raise SystemExit("the server did not start")
        try:
            yield url, psutil.Process(process.pid)
        finally:
            process.terminate()
            rest = process.stderr.read()
            code = process.wait(60)
            print(rest.rstrip() or "(nothing more on standard error)")
            print(f"exit code {code}")


def texts(answer: dict[str, Any]) -> list[str]:
    """The texts of a whole answer."""
    return [choice["text"] for choice in answer["choices"]]


async def ask(http: httpx.AsyncClient, case: dict[str, Any], alone: list[str], tally: Tally) -> None:
    """One request, whole or streamed; its answer is compared."""
    if random.random() < 0.5:
        response = await http.post("/v1/completions", json=case)
        tally.codes[str(response.status_code)] += 1
        if response.status_code != 200:
            await asyncio.sleep(float(response.headers.get("retry-after", 0)))
            return
        got = texts(response.json())
    else:
        got = [""] * len(alone)
        async with http.stream("POST", "/v1/completions", json=case | {"stream": True}) as response:
            tally.codes[str(response.status_code)] += 1
            if response.status_code != 200:
                await asyncio.sleep(float(response.headers.get("retry-after", 0)))
                return
            lines = [line async for line in response.aiter_lines() if line]
        if lines[-1] != "data: [DONE]":
            tally.wrong.append(f"a stream ended with {lines[-1]}")
            return
        for line in lines[:-1]:
            for choice in json.loads(line[6:])["choices"]:
                got[choice["index"]] += choice["text"]
    if got == alone:
        tally.right += 1
    else:
        tally.wrong.append(f"{case['prompt'][:30]!r}: {got} is not {alone}")


async def hang_up(http: httpx.AsyncClient, case: dict[str, Any], rng: random.Random, tally: Tally) -> None:
    """Ask, and leave in the middle: after some chunks, or before anything came."""
    tally.hung_up += 1
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(rng.uniform(0.01, 3)):
            if rng.random() < 0.5:
                await http.post("/v1/completions", json=case | {"max_tokens": 500})
                return
            async with http.stream(
                "POST", "/v1/completions", json=case | {"stream": True, "max_tokens": 500}
            ) as response:
                left = rng.randint(1, 6)
                async for _ in response.aiter_lines():
                    left -= 1
                    if left == 0:
                        return


async def send_rubbish(http: httpx.AsyncClient, rng: random.Random, tally: Tally) -> None:
    """Something that is refused."""
    tally.rubbish += 1
    body = rng.choice(RUBBISH)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = await http.post("/v1/completions", content=data, headers={"content-type": "application/json"})
    tally.codes[str(response.status_code)] += 1
    if not 400 <= response.status_code < 500:
        tally.wrong.append(f"rubbish {data[:40]!r} gave {response.status_code}")


async def client(
    url: str, seed: int, cases: list[dict[str, Any]], alone: list[list[str]], tally: Tally, most: int
) -> None:
    """One client: a third of what it asks it leaves, a tenth is rubbish."""
    rng = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as http:
        while tally.sent < most:
            tally.sent += 1
            which, kind = rng.randrange(len(cases)), rng.random()
            if kind < 0.1:
                await send_rubbish(http, rng, tally)
            elif kind < 0.1 + 1 / 3:
                await hang_up(http, cases[which], rng, tally)
            else:
                await ask(http, cases[which], alone[which], tally)
            await asyncio.sleep(rng.uniform(0, 0.05))


async def metric(http: httpx.AsyncClient, name: str) -> float:
    """One value of /metrics."""
    text = (await http.get("/metrics")).text
    return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)[1])  # type: ignore[index]


async def watch(process: psutil.Process, rss: list[float]) -> None:
    """The server's resident memory, in MiB, every five seconds."""
    while True:
        rss.append(process.memory_info().rss / 2**20)
        await asyncio.sleep(5)


async def run(url: str, process: psutil.Process, args: argparse.Namespace) -> bool:
    """The whole test against a running server; whether all was well."""
    tally = Tally()
    rss: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        cases = make_cases(args.cases, args.max_tokens, model, random.Random(args.seed))
        start = time.monotonic()
        alone = [texts((await http.post("/v1/completions", json=case)).json()) for case in cases]
        print(f"{len(cases)} cases asked alone in {time.monotonic() - start:.1f} s")
        watching = asyncio.ensure_future(watch(process, rss))
        start = time.monotonic()
        clients = [
            asyncio.ensure_future(client(url, args.seed + i, cases, alone, tally, args.requests))
            for i in range(args.clients)
        ]
        done, late = await asyncio.wait(clients, timeout=args.seconds)
        seconds = time.monotonic() - start
        for task in late:  # what still waits hangs up
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        failed = [repr(task.exception()) for task in done if task.exception() is not None]
        for _ in range(600):
            if not await metric(http, "kvarn_in_flight") and not await metric(http, "kvarn_running"):
                break
            await asyncio.sleep(0.1)
        watching.cancel()
        rss.append(process.memory_info().rss / 2**20)
        held = {what: int(await metric(http, f'kvarn_{what}{{state="held"}}')) for what in ("blocks", "slots")}
        preemptions = int(await metric(http, "kvarn_preemptions_total"))
        generated = int(await metric(http, "kvarn_generated_tokens_total"))
        again = [texts((await http.post("/v1/completions", json=case)).json()) for case in cases[:3]]
    print(f"{args.clients} clients, {tally.sent} requests in {seconds:.1f} s, {generated} tokens generated in all")
    print(f"codes: {dict(sorted(tally.codes.items()))}; hung up: {tally.hung_up}; rubbish: {tally.rubbish}")
    print(f"answers equal to those given alone: {tally.right} of {tally.right + len(tally.wrong)}")
    for text in [*tally.wrong[:10], *failed[:10]]:
        print(f"  wrong: {text}")
    print(f"leaked: {held['blocks']} blocks, {held['slots']} slots; preemptions: {preemptions}")
    print("server RSS in MiB: " + " ".join(f"{x:.0f}" for x in rss))
    same = again == alone[:3]
    print(f"afterwards the first cases give the same: {same}")
    bad_codes = [code for code in tally.codes if code.startswith("5")]
    return not tally.wrong and not failed and not any(held.values()) and not bad_codes and same


def main() -> None:
    """Parse the flags and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--requests", type=int, default=100_000, help="the most requests in all")
    parser.add_argument("--cases", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--serve", default="--dtype float32 --ctx-size 1024", help="further flags of kvarn serve")
    args = parser.parse_args()
    with server(args.model, args.serve.split()) as (url, process):
        well = asyncio.run(run(url, process, args))
    print("all well" if well else "NOT WELL")
    sys.exit(not well)


if __name__ == "__main__":
    main()
