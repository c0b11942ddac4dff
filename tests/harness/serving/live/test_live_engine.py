"""Servers and client of a live engine: entered before they are used, ended however it ends."""

from __future__ import annotations

import pytest

from harness.serving.experiment.run import LiveWhenAsked
from harness.serving.live import live_engine as module
from harness.serving.live.client.load import ClientLoad
from harness.serving.live.live_engine import LiveSetup, live_engine
from tests.support.serving_experiments import Doubles


def recorded(name, events, fails_at_exit=False):
    class Recorded:
        def __init__(self, *_, **__):
            pass

        def __enter__(self):
            events.append(f"{name} entered")
            return self

        def __exit__(self, kind, error, trace):
            events.append(f"{name} ended, {error}")
            if fails_at_exit:
                raise OSError("a server that does not end")

    return Recorded


@pytest.fixture
def setup(tmp_path):
    return LiveSetup("server {port}", "client {url} {result}", tmp_path, tmp_path, ClientLoad())


def test_the_client_ends_too_where_servers_fail_to(setup, monkeypatch):
    events = []
    monkeypatch.setattr(LiveSetup, "kind", None)
    monkeypatch.setattr(module, "Client", recorded("client", events))
    monkeypatch.setattr(module, "Servers", recorded("servers", events, fails_at_exit=True))
    with pytest.raises(OSError, match="does not end"), live_engine(setup, print):
        pass
    ended = ["servers ended, None", "client ended, a server that does not end"]
    assert events == ["client entered", "servers entered", *ended]


def test_an_experiment_opens_its_engine_when_it_is_first_asked_and_closes_it_with_the_error(tmp_path):
    doubles, events = Doubles(tmp_path), []
    with LiveWhenAsked(recorded("engine", events)) as live:
        live.rest()
    assert not events
    with pytest.raises(ValueError), LiveWhenAsked(doubles.live) as live:
        live.look()
        live.trace(None, "base")
        raise ValueError("mid-experiment")
    assert doubles.opened == 1
    with pytest.raises(ValueError), LiveWhenAsked(recorded("engine", events)) as live:
        live._opened()
        raise ValueError("mid-experiment")
    assert events == ["engine entered", "engine ended, mid-experiment"]
