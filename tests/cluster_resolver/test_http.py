"""HTTP requests: timeouts, retries, and errors that name the URL."""

from __future__ import annotations

import socket
import time

import pytest

import distribute_jax as dj
from distribute_jax.cluster_resolver._gce import google_service


def _service(root, timeout=10.0, credentials=None):
    return google_service("The test", root, credentials, timeout)


def test_get_and_post_with_a_token(server):
    server.answers["/a?b=c"] = '{"d": 1}'
    service = _service(server.url, credentials="secret")
    assert service.json("/a?b=c") == {"d": 1}
    assert service.text("/a?b=c", body={"e": 2}) == '{"d": 1}'
    (get, _, headers, _), (post, _, _, body) = server.asked
    assert (get, post, body, headers["authorization"]) == (
        "GET",
        "POST",
        '{"e": 2}',
        "Bearer secret",
    )


def test_a_busy_service_is_retried_twice(server):
    server.answers["/a"] = [503, 429, "now"]
    assert _service(server.url).text("/a") == "now"
    server.answers["/a"] = 503
    with pytest.raises(dj.ServiceError, match=r"/a answered 503 Service Unavailable") as error:
        _service(server.url).text("/a")
    assert error.value.status == 503
    assert len(server.asked) == 6


def test_a_refusal_is_not_retried_and_hides_the_token(server):
    server.answers["/a"] = 403
    with pytest.raises(
        RuntimeError, match=r"The test: http://127.0.0.1:\d+/a answered 403 .*Check project"
    ) as error:
        _service(server.url, credentials="secret").text("/a")
    assert len(server.asked) == 1
    assert "secret" not in str(error.value)


def test_a_silent_service_times_out_without_a_retry(server):
    server.answers["/a"] = "silence"
    start = time.monotonic()
    with pytest.raises(
        dj.ServiceError, match=r"no answer from http://127.0.0.1:\d+/a within 0.5 s"
    ) as error:
        _service(server.url, timeout=0.5).text("/a")
    assert time.monotonic() - start < 15
    assert error.value.status is None


def test_a_refused_connection_names_the_url():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # bound and not listening: refused
        root = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(dj.ServiceError, match=rf"no answer from {root}/a .*refused"):
            _service(root).text("/a")


@pytest.mark.parametrize("answer", ["<html>", "[1]", ""])
def test_an_answer_that_is_not_a_json_object_is_shown(server, answer):
    """Such as the page of a proxy."""
    server.answers["/a"] = answer
    with pytest.raises(RuntimeError, match="which is not a JSON object"):
        _service(server.url).json("/a")
