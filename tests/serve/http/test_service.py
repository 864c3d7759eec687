"""The queue's bound, and the server's ways from loading over ready to draining."""

import threading
from typing import Any

import httpx

from kvarn.serve.http.service import Limits


def test_a_full_queue_is_a_429_with_retry_after(serve: Any, until: Any, expected: Any) -> None:
    with serve(places=2, limits=Limits(max_queue=1)) as own:
        own.backend.close_gate()
        answers: list[httpx.Response] = []
        threads = [threading.Thread(target=lambda: answers.append(own.complete())) for _ in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: own.service.in_flight == 3)
        response = own.complete()
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "queue_full"
        assert own.chat().status_code == 429
        own.backend.open_gate()
        for thread in threads:
            thread.join(20)
        assert [answer.json()["choices"][0]["text"] for answer in answers] == [expected("hi", 5)] * 3
        assert own.complete().status_code == 200


def test_while_loading_only_health_and_metrics_answer(serve: Any) -> None:
    with serve(ready=False) as own:
        health = own.http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "loading"})
        for response in (own.chat(), own.complete(), own.http.get("/v1/models"), own.http.get("/v1/cache")):
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "loading"
            assert "retry-after" in response.headers
        assert own.http.get("/metrics").status_code == 200
        own.on_loop(lambda: own.service.fail(ValueError("no such model")))
        assert own.http.get("/health").json() == {"status": "failed"}


def test_draining_finishes_what_runs_and_takes_nothing_new(serve: Any, until: Any, expected: Any) -> None:
    with serve() as own:
        own.backend.close_gate()
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(own.complete()))
        thread.start()
        until(lambda: own.service.in_flight == 1)
        drained = threading.Thread(target=lambda: own.run(own.service.drain(20)))
        drained.start()
        until(lambda: own.service.status == "draining")
        health = own.http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "draining"})
        assert own.complete().status_code == 503
        own.backend.open_gate()
        thread.join(20)
        drained.join(20)
        assert answers[0].json()["choices"][0]["text"] == expected("hi", 5)


def test_draining_cancels_what_takes_too_long(serve: Any, until: Any) -> None:
    with serve() as own:
        own.backend.close_gate()
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(own.complete(max_tokens=900)))
        thread.start()
        until(lambda: own.service.in_flight == 1)
        own.run(own.service.drain(0.05))
        thread.join(20)
        assert answers[0].status_code == 503
        assert answers[0].json()["error"]["code"] == "shutting_down"
        own.backend.open_gate()
        until(own.idle)
