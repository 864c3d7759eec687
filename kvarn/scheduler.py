"""Waiting and running requests -> StepPlan, and StepResult -> events: admission, chunked prefill, decode, preemption.

Deterministic: the same arrivals give the same plans. Every step runs one token of each request that is answering, and
gives what is left of the token budget to prompts, first come, first served; so a long prompt holds the answers up by
one chunk at most. A request that finds no room preempts the youngest one, which waits again and is computed again, as
far as its tiles were evicted meanwhile. Tiles that a tier below the memory holds are taken over as they arrive, while
the other requests go on.
"""

from collections import deque
from dataclasses import dataclass, field

from kvarn.block_pool import BlockPool
from kvarn.capacity import Holding, holding_of
from kvarn.constraint import FORBIDDING_BIAS, Guide
from kvarn.errors import CapacityError, ContextOverflowError, KvarnError, SealError
from kvarn.keys import Key, block_key
from kvarn.prefix_cache import PrefixCache
from kvarn.request import Event, FinishReason, Request, RequestParams
from kvarn.step import Span, SpanOutput, StepPlan, StepResult
from kvarn.stopping import StopStrings
from kvarn.tier import NO_TIER, Computed, Tier
from kvarn.visibility import completed_tiles


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of the schedule. `sealed` is false under `exact`, where every tile keeps a slot.

    context: the most tokens of one sequence. prefill_chunk: prompt tokens of one request in a step. token_budget:
    tokens of all requests in a step. max_sequences: requests that run at once.
    """

    tile_tokens: int
    sealed: bool
    context: int
    prefill_chunk: int
    token_budget: int
    max_sequences: int

    def __post_init__(self) -> None:
        assert self.token_budget >= self.max_sequences, "every running request needs a token of the budget"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A step, and the request of each of its spans."""

    step: StepPlan
    requests: tuple[Request, ...]


@dataclass(kw_only=True)
class Counters:
    """What happened since the start."""

    preemptions: int = 0
    cached_tokens: int = 0  # found in memory
    restored_tokens: int = 0  # taken over from the tier below
    computed_tokens: int = 0


@dataclass(kw_only=True)
class Scheduler:
    """Owns the block tables: which request holds which blocks and slots."""

    config: SchedulerConfig
    blocks: BlockPool
    slots: BlockPool
    tier: Tier = NO_TIER
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)  # in the order of arrival
    copies: list[tuple[int, int]] = field(default_factory=list)  # slot -> slot, to be done before the next step
    waits_for: str | None = None  # why the first waiting request was not admitted
    counters: Counters = field(default_factory=Counters)
    _next_group: int = 0

    def __post_init__(self) -> None:
        self.cache = PrefixCache(self.blocks, self.slots)

    def check(self, params: RequestParams) -> None:
        """ContextOverflowError when a prompt leaves no room for one token of answer."""
        room = self.config.context - (1 if params.max_tokens else 0)
        if len(params.prompt) > room:
            raise ContextOverflowError(num_prompt_tokens=len(params.prompt), context=self.config.context)

    def add(self, params: RequestParams) -> Request:
        """Queue a request, once `check` has passed it; ConstraintError when its grammar allows no beginning."""
        self.check(params)
        request = self._request(self._next_group, params, choice=0)
        if request.guide is not None and request.guide.error is not None:
            raise request.guide.error
        request.to_fork = params.n - 1
        self._next_group += 1
        self._fetch(request, len(self.cache.peek(self._reusable(request))))
        self.waiting.append(request)
        return request

    def _request(self, group: int, params: RequestParams, choice: int) -> Request:
        request = Request(group=group, params=params, tokens=list(params.prompt), choice=choice)
        if params.text is not None:
            request.stream = params.text()
            request.stops = StopStrings(params.stop)
        if params.constraint is not None:
            biases = params.sampling.logit_bias.items()
            forbidden = [token for token, bias in biases if bias <= FORBIDDING_BIAS]
            request.guide = Guide(params.constraint, params.stop_token_ids, forbidden)
        return request

    def cancel(self, request: Request) -> bool:
        """Take a request out, wherever it is; whether it was still there."""
        if request in self.running:
            self._end(request)
            return True
        if request in self.waiting:
            self.waiting.remove(request)
            self._stop_fetch(request)
            return True
        return False

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def restores(self) -> bool:
        """Whether a running request waits for tiles from the tier below."""
        return any(request.fetch is not None for request in self.running)

    def plan(self) -> Planned | None:
        """The next step; None when there is nothing to do, or nothing before more tiles arrive (`restores`)."""
        self._admit()
        for request in list(self.running):
            if request.fetch is not None:
                self._take_over(request)
        budget = self.config.token_budget - sum(self._answers(request) for request in self.running)
        spans: list[tuple[Request, int]] = []
        for request in list(self.running):
            if request not in self.running or request.fetch is not None:
                continue  # preempted by an older one, or not complete yet
            answers = self._answers(request)
            stop = request.num_computed_tokens + 1 if answers else self._chunk_end(request, budget)
            if stop == request.num_computed_tokens or not self._reserve(request, stop):
                continue
            if not answers:
                budget -= stop - request.num_computed_tokens
            spans.append((request, stop))
        if not spans:
            assert self.restores or not self.running, "a running request that is alone always finds room"
            return None
        step = StepPlan(spans=tuple(self._span(request, stop) for request, stop in spans))
        return Planned(step=step, requests=tuple(request for request, _ in spans))

    def _answers(self, request: Request) -> bool:
        """Whether its next step runs one last token and generates another."""
        last = len(request.tokens) - request.num_computed_tokens == 1
        return last and not request.to_fork and request.fetch is None

    def _chunk_end(self, request: Request, budget: int) -> int:
        """Where the next chunk of a prompt ends: on the tile grid, where the budget cuts it short."""
        start, g = request.num_computed_tokens, self.config.tile_tokens
        goal = len(request.tokens) - (1 if request.to_fork else 0)
        stop = min(goal, start + self.config.prefill_chunk)
        if stop > start + budget:
            stop = start + max(budget, 0)
            grid = stop // g * g
            stop = grid if grid > start else stop
        return stop

    # Room: admission, reservation, preemption.

    def _admit(self) -> None:
        """Move waiting requests to running, in order, while there is room for their whole prompts."""
        self.waits_for = None
        while self.waiting:
            request = self.waiting[0]
            if len(self.running) >= self.config.max_sequences:
                self.waits_for = f"a place: {len(self.running)} of {self.config.max_sequences} sequences run"
                return
            self.waits_for = self._lacks(request) if self.running else None
            if self.waits_for:
                return
            self.waiting.popleft()
            self.running.append(request)
            self._start(request)

    def _reusable(self, request: Request) -> list[Key]:
        """The keys of the full tiles that may be reused: at least one token is always computed."""
        self._extend_keys(request)
        if request.params.return_logits:
            return []
        return request.keys[: (len(request.tokens) - 1) // self.config.tile_tokens]

    def _need(self, request: Request) -> Holding:
        """Blocks and slots that a request's tokens take in all."""
        return holding_of(len(request.tokens), self.config.tile_tokens, sealed=self.config.sealed)

    def _lacks(self, request: Request) -> str | None:
        """What a request's tokens need beyond what can be had, beside the tiles that it reuses; None: it fits.

        What running prompts have still to take is promised to them.
        """
        reusable = self.cache.peek(self._reusable(request))
        for what, pool in (("blocks", self.blocks), ("slots", self.slots)):
            reused = [place.index for place in reusable if place.pool is pool]
            fresh = getattr(self._need(request), what) - len(reused)
            promised = sum(max(getattr(self._need(r), what) - len(getattr(r, what)), 0) for r in self.running)
            free = pool.num_available - sum(pool.references(index) == 0 for index in reused) - promised
            if fresh > free:
                return f"{what}: needs {fresh}, {max(free, 0)} are free"
        return None

    def _start(self, request: Request) -> None:
        """Take over the tiles that are known already."""
        matched = self.cache.match(self._reusable(request))
        request.num_computed_tokens = len(matched) * self.config.tile_tokens
        if self.config.sealed:
            request.slots, request.blocks = matched[:1], matched[1:]
        else:
            request.slots = matched
        self.counters.cached_tokens += request.num_computed_tokens
        # Asked when it arrived; again where it ran before, or where tiles that it counted on were evicted meanwhile.
        stale = request.fetch is not None and request.fetch.first > len(matched)
        if stale or (request.fetch is None and (request.num_preemptions or request.choice)):
            self._stop_fetch(request)
            self._fetch(request, len(matched))
        if request.fetch is None:
            self._started(request)

    def _started(self, request: Request) -> None:
        """Everything that can be reused is there."""
        if request.num_preemptions == 0 and request.choice == 0:
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        if request.to_fork and request.num_computed_tokens == request.num_prompt_tokens - 1:
            self._fork(request)

    # The tier below.

    def _fetch(self, request: Request, first: int) -> None:
        """Ask the tier for the tiles from `first` on."""
        root = self.tier.root(request.params.tenant)
        request.fetch = self.tier.fetch(root, self._reusable(request), first)

    def _stop_fetch(self, request: Request) -> None:
        if request.fetch is not None:
            request.fetch.cancel()
            request.fetch = None

    def _take_over(self, request: Request) -> None:
        """Take over the tiles that have arrived; a tile that is missing, or finds no room, ends it."""
        fetch, g = request.fetch, self.config.tile_tokens
        assert fetch is not None
        done = fetch.done  # before looking: what arrives later is seen the next time
        for tile, record in fetch.take():
            if tile < request.num_computed_tokens // g:
                continue
            key = request.keys[tile]
            known = self.cache.match([key])
            if known:
                index = known[0]
            else:
                pool = self.slots if tile == 0 or not self.config.sealed else self.blocks
                if not pool.num_available:
                    done = True
                    break
                index = pool.allocate()
                if not self.tier.adopt(record, index, sink=pool is self.slots):
                    pool.release(index)
                    done = True
                    break
                self.cache.publish(key, pool, index)
                self.counters.restored_tokens += g
            (request.slots if tile == 0 or not self.config.sealed else request.blocks).append(index)
            request.num_computed_tokens += g
        if done:
            self._stop_fetch(request)
            self._started(request)

    def _reserve(self, request: Request, stop: int) -> bool:
        """Make room for the tokens up to `stop`, at the cost of younger requests; False when it was preempted."""
        g = self.config.tile_tokens
        last_tile = (stop - 1) // g
        slots = (min(last_tile, 1) if self.config.sealed else last_tile) + 1 - len(request.slots)
        blocks = 0
        if self.config.sealed:
            blocks = len(completed_tiles(0, stop, g)) - len(request.blocks)
        while slots > self.slots.num_available or blocks > self.blocks.num_available:
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is request:
                return False
        request.slots += [self.slots.allocate() for _ in range(slots)]
        request.blocks += [self.blocks.allocate() for _ in range(blocks)]
        return True

    def _preempt(self, request: Request) -> None:
        assert len(self.running) > 1, "one sequence of the whole context always fits"
        self._release(request)
        self._stop_fetch(request)
        self.running.remove(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.counters.preemptions += 1
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        # The last tile first, so that a chain is evicted from its end.
        for block in reversed(request.blocks):
            self.blocks.release(block)
        for slot in reversed(request.slots):
            self.slots.release(slot)
        request.blocks, request.slots = [], []

    def _end(self, request: Request) -> None:
        self._release(request)
        self._stop_fetch(request)
        self.running.remove(request)

    # Spans out, results in.

    def _span(self, request: Request, stop: int) -> Span:
        start, g = request.num_computed_tokens, self.config.tile_tokens
        sealing = len(completed_tiles(start, stop, g)) if self.config.sealed else 0
        before = len(request.blocks) - sealing
        generates = stop == len(request.tokens) and request.params.max_tokens > 0
        row = None
        if generates:
            allowed = request.guide.mask or None if request.guide else None
            row = request.params.sampling.row(request.params.prompt, request.answer, request.choice, allowed)
        return Span(
            tokens=tuple(request.tokens[start:stop]),
            start=start,
            slots=tuple(request.slots),
            blocks=tuple(request.blocks[:before]),
            seal_into=tuple(request.blocks[before:]),
            want="all" if request.params.return_logits else "last" if generates else "none",
            sampling=row,
        )

    def commit(self, planned: Planned, result: StepResult) -> list[Event]:
        """Take in what a step did; a request whose tile could not be sealed ends with that error, alone."""
        events = []
        failures = {failure.span: failure for failure in reversed(result.failures)}
        spans = zip(planned.step.spans, planned.requests, result.outputs, strict=True)
        for i, (span, request, output) in enumerate(spans):
            if request not in self.running:
                continue  # cancelled while the step ran
            if i in failures:
                failure = failures[i]
                error = SealError(failure.reason, layer=failure.layer, kv_head=failure.kv_head)
                events.append(self._failed(request, error))
                continue
            self.counters.computed_tokens += len(span.tokens)
            request.num_computed_tokens = span.stop
            self._publish(request, span.start)
            if request.guide is not None and output.token is not None:
                request.guide.accept(output.token)
                if request.guide.error is not None:
                    events.append(self._failed(request, request.guide.error))
                    continue
            events.append(self._event(request, span, output))
            if events[-1].finish_reason is not None:
                self._end(request)
            elif request.to_fork and span.stop == request.num_prompt_tokens - 1:
                self._fork(request)
        return events

    def fail(self, planned: Planned, error: KvarnError) -> list[Event]:
        """End every request of a step that did not come back."""
        return [self._failed(request, error) for request in planned.requests if request in self.running]

    def _failed(self, request: Request, error: KvarnError) -> Event:
        self._end(request)
        return Event(request=request, finish_reason="error", error=error)

    def _event(self, request: Request, span: Span, output: SpanOutput) -> Event:
        if output.token is None:
            done = span.stop == len(request.tokens) and not request.params.max_tokens
            logits = output.logits
            if logits is not None:
                logits = logits[max(request.num_scored_tokens - span.start, 0) :]  # not again after a preemption
                request.num_scored_tokens = max(request.num_scored_tokens, span.stop)
            return Event(request=request, logits=logits, finish_reason="length" if done else None)
        stream, stops, guide = request.stream, request.stops, request.guide
        if output.token in request.params.stop_token_ids or (guide is not None and guide.empty):
            rest = stops.add(stream.finish()) + stops.finish() if stream and stops else ""
            return Event(request=request, text=rest, finish_reason="stop")
        request.tokens.append(output.token)
        full = request.num_generated_tokens >= request.params.max_tokens or len(request.tokens) >= self.config.context
        complete = guide is not None and guide.ended
        reason: FinishReason | None = "stop" if complete else "length" if full else None
        text = ""
        if stream and stops:
            text = stops.add(stream.add(output.token))
            if reason and not stops.found:
                text += stops.add(stream.finish())
                text += stops.finish()
            if stops.found:
                reason = "stop"
        return Event(
            request=request,
            token=output.token,
            logprob=output.logprob,
            top_logprobs=output.top_logprobs,
            text=text,
            finish_reason=reason,
        )

    # Sharing.

    def _extend_keys(self, request: Request) -> None:
        g = self.config.tile_tokens
        while (len(request.keys) + 1) * g <= len(request.tokens):
            start = len(request.keys) * g
            parent = request.keys[-1] if request.keys else self.tier.root(request.params.tenant)
            request.keys.append(block_key(parent, request.tokens[start : start + g]))

    def _publish(self, request: Request, start: int) -> None:
        """Make the tiles known that were completed since `start`."""
        g = self.config.tile_tokens
        self._extend_keys(request)
        root = self.tier.root(request.params.tenant)
        for tile in range(start // g, request.num_computed_tokens // g):
            key, exact = request.keys[tile], tile == 0 or not self.config.sealed
            pool, held, at = (self.slots, request.slots, tile) if exact else (self.blocks, request.blocks, tile - 1)
            own = held[at]
            held[at] = self.cache.publish(key, pool, own)
            if held[at] == own:
                parent = request.keys[tile - 1] if tile else root
                tokens = tuple(request.tokens[tile * g : (tile + 1) * g])
                self.tier.computed(Computed(key=key, parent=parent, root=root, tokens=tokens, index=own, sink=exact))

    def _fork(self, request: Request) -> None:
        """Split off the further answers of a request whose prompt is computed but for its last token.

        Full tiles are shared, a tile that is still filling is copied. An answer that finds no room waits like any
        other request and computes what it needs.
        """
        g, computed = self.config.tile_tokens, request.num_computed_tokens
        choices = range(1, request.to_fork + 1)
        request.to_fork = 0
        place = self.running.index(request)
        waiting = []
        for choice in choices:
            child = self._request(request.group, request.params, choice)
            child.num_cached_tokens = request.num_cached_tokens
            child.times.arrived = request.times.arrived
            child.keys = list(request.keys[: computed // g])
            partial = computed % g != 0
            if len(self.running) >= self.config.max_sequences or partial > self.slots.num_available:
                waiting.append(child)
                continue
            child.num_computed_tokens = computed
            child.blocks = list(request.blocks)
            for block in child.blocks:
                self.blocks.share(block)
            full = request.slots[: computed // g] if not self.config.sealed else request.slots[: min(computed // g, 1)]
            for slot in full:
                self.slots.share(slot)
            child.slots = list(full)
            if partial:
                child.slots.append(self.slots.allocate())
                self.copies.append((request.slots[len(full)], child.slots[-1]))
            place += 1
            self.running.insert(place, child)
        self.waiting.extendleft(reversed(waiting))


def check_room(context: int, pools: tuple[BlockPool, BlockPool], need: tuple[int, int]) -> None:
    """CapacityError unless one sequence of the whole context fits both pools."""
    for pool, count, what in zip(pools, need, ("blocks", "slots"), strict=True):
        if count > pool.size:
            raise CapacityError(f"a context of {context} tokens needs {count} {what}, the pool has {pool.size}")
