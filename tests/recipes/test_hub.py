"""Whether the Hub answers is decided quickly under any network failure."""

import http.server
import threading
import time

import pytest
from huggingface_hub import constants

from cases import full, in_full
from common import hub


class Answer(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_response(200 if self.path == "/some-model/resolve/main/config.json" else 404)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def endpoint(monkeypatch):
    """A hub on this machine that has one model."""
    server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield server
    server.shutdown()
    server.server_close()


def test_a_hub_that_answers(endpoint):
    assert hub.why_unavailable("some-model") is None
    assert hub.why_unavailable("another-model") == "no another-model on the hub (status 404)"
    hub.check_hub("a private name, which another answer than 200 does not rule out")


def test_a_hub_that_is_down(endpoint):
    endpoint.shutdown()
    endpoint.server_close()
    assert hub.why_unavailable("some-model").startswith("no hub (http://127.0.0.1:")
    with pytest.raises(ValueError, match=r"--model x is no folder here, .* HF_HUB_OFFLINE=1 to use the local cache"):
        hub.check_hub("--model x")


@full
def test_offline_by_wish_asks_nobody(endpoint, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "ask", lambda url: pytest.fail(f"asked for {url}"))
    assert hub.why_unavailable("some-model") == "HF_HUB_OFFLINE is set"
    hub.check_hub("--model x")


@full
def test_a_network_that_swallows_everything(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "SECONDS", 0.1)
    monkeypatch.setattr(hub, "status", lambda url: time.sleep(5))
    begin = time.monotonic()
    assert "no answer for 0.2 s" in hub.why_unavailable("some-model")
    assert time.monotonic() - begin < 2


@full
@pytest.mark.parametrize("name", ["google/boolq", *in_full("bert-base-uncased", "super_glue/boolq")])
def test_names_of_the_hub(name):
    assert hub.is_hub_name(name)


@pytest.mark.parametrize("name", ["../a", "a/b/c", *in_full("", "/a", "a/", "./a", "~/a", ".", "a/.b")])
def test_paths_are_no_names(name):
    assert not hub.is_hub_name(name)
