"""Live serving runs: an engine started, loaded by a real client, stopped; its arms taken in turn."""
