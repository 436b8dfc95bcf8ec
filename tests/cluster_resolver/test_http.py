"""Requests to services: bounded in time, and errors that say which address did what."""

from __future__ import annotations

import socket
import time

import pytest

import distribute_jax as dj
from distribute_jax.cluster_resolver._http import Service


def _service(server, **more):
    return Service(name="The test", root=server.url, hint="Ask again.", **more)


def test_an_answer_is_given_as_it_is(server):
    """By GET without a body and by POST with one, with the headers of the service."""
    server.answers["/a?b=c"] = '{"d": 1}'
    service = _service(server, headers={"X-One": "two"})
    assert service.json("/a?b=c") == {"d": 1}
    assert service.text("/a?b=c", body={"e": 2}) == '{"d": 1}'
    (get, _, headers, _), (post, _, _, body) = server.asked
    assert (get, post, body, headers["x-one"]) == ("GET", "POST", '{"e": 2}', "two")


def test_a_service_that_is_busy_is_asked_again(server):
    """Until it answers, and not more often than three times."""
    server.answers["/a"] = [503, 429, "now"]
    assert _service(server).text("/a") == "now"
    server.answers["/a"] = 503
    with pytest.raises(dj.ServiceError, match=r"/a answered 503 Service Unavailable") as error:
        _service(server).text("/a")
    assert error.value.status == 503
    assert len(server.asked) == 6


def test_a_refusal_is_final_and_shown_without_the_token(server):
    """A 403 does not change by asking again."""
    server.answers["/a"] = 403
    with pytest.raises(
        RuntimeError, match=r"The test: http://127.0.0.1:\d+/a answered 403 .*Ask again."
    ) as error:
        _service(server, headers={"Authorization": "Bearer secret"}).text("/a")
    assert len(server.asked) == 1
    assert "secret" not in str(error.value)


def test_nobody_is_followed_to_another_address(server):
    """The token would go there too."""
    server.answers |= {"/a": 302, "/elsewhere": "the token, please"}
    with pytest.raises(dj.ServiceError, match="answered 302"):
        _service(server).text("/a")


@pytest.mark.parametrize("answer", ["silence", "dribble"])
def test_an_answer_that_does_not_come_is_an_error_in_time(server, answer):
    """Whether nothing comes or a little without end, the time is bounded, and the address is named."""
    server.answers["/a"] = answer
    began = time.monotonic()
    with pytest.raises(
        RuntimeError, match=r"no answer from http://127.0.0.1:\d+/a within 0.5 s"
    ) as error:
        _service(server, timeout=0.5).text("/a")
    assert time.monotonic() - began < 15
    assert error.value.status is None


def test_nobody_at_an_address_is_an_error_that_names_it():
    """After three attempts, well before the time is over."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound and not listening: refused
        root = f"http://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(
            dj.ServiceError, match=rf"no answer from {root}/a .*ConnectionRefusedError"
        ):
            Service(name="The test", root=root, hint="").text("/a")


@pytest.mark.parametrize("answer", ["<html>", "[1]", ""])
def test_an_answer_of_another_form_is_shown(server, answer):
    """A proxy's page is no JSON object."""
    server.answers["/a"] = answer
    with pytest.raises(RuntimeError, match="which is no JSON object"):
        _service(server).json("/a")


def test_proxies_are_for_the_services_outside_only(server, monkeypatch):
    """A service inside the cluster is asked directly, whatever the environment says."""
    server.answers["/a"] = "direct"
    server.answers["http://outside.test/a"] = "by proxy"
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert _service(server).text("/a") == "direct"
    outside = Service(name="The test", root="http://outside.test", hint="", proxies=True)
    assert outside.text("/a") == "by proxy"
