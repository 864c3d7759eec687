"""What Prometheus reads agrees with what was served."""

from typing import Any

from prometheus_client.parser import text_string_to_metric_families


def read(server: Any) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    return {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}


def test_the_metrics_count_requests_tokens_blocks_and_times(serve: Any, until: Any) -> None:
    with serve() as own:
        own.complete(prompt="x" * 200)
        own.complete(prompt="x" * 200, n=2, stream=True)
        own.chat(model="other")
        own.http.get("/nowhere")
        until(own.idle)
        got = read(own)
        assert got["kvarn_requests_total", "/v1/completions", "200"] == 2
        assert got["kvarn_requests_total", "/v1/chat/completions", "404"] == 1
        assert got["kvarn_requests_total", "404", "other"] == 1
        assert got["kvarn_prompt_tokens_total",] == 400
        assert got["kvarn_generated_tokens_total",] == 15
        assert got["kvarn_cached_tokens_total",] == 192
        assert got["kvarn_time_to_first_token_seconds_count",] == 3
        assert got["kvarn_inter_token_seconds_count",] == 12
        assert (got["kvarn_running",], got["kvarn_waiting",], got["kvarn_in_flight",]) == (0, 0, 0)
        assert (got["kvarn_blocks", "held"], got["kvarn_blocks", "kept"], got["kvarn_blocks", "free"]) == (0, 2, 38)
        assert got["kvarn_preemptions_total",] == 0
        assert got["kvarn_ready",] == 1


def test_a_request_that_runs_and_one_that_waits_are_seen(serve: Any, until: Any) -> None:
    import threading

    with serve(places=1) as own:
        own.backend.close_gate()
        threads = [threading.Thread(target=own.complete) for _ in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: own.service.in_flight == 2)
        until(lambda: len(own.engine.scheduler.running) == 1)
        got = read(own)
        assert (got["kvarn_running",], got["kvarn_in_flight",]) == (1, 2)
        own.backend.open_gate()
        for thread in threads:
            thread.join(20)
