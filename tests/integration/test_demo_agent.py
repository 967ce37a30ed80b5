"""The agent demo through the front door, with real processes."""

from pathlib import Path

from app.events.schema import CompletionEvent, FeedbackEvent, decode
from app.events.sqlite import SqliteLog
from tests.demo import run_demo

SESSIONS = 4
PNG = b"\x89PNG"


def test_the_agent_demo_learns_from_every_session(tmp_path: Path) -> None:
    """An update a session, the promised numbers and a picture; the log holds the turns of a session together."""
    report = run_demo(tmp_path, "demo-agent", "--sessions", str(SESSIONS))
    assert {"success_first50", "success_last50", "bad_calls_first50", "bad_calls_last50", "wall_s"} <= report.keys()
    assert (report["seed"], report["sessions"], report["updates"]) == (3, SESSIONS, SESSIONS)
    assert report["success_first50"] == report["success_last50"]  # the same four
    assert (tmp_path / "out/demo-agent.png").read_bytes().startswith(PNG)

    events = [decode(record.payload) for record in SqliteLog(tmp_path / "home/log.db").read({}, 10_000)]
    completions = [event for event in events if isinstance(event, CompletionEvent)]
    judgements = [event for event in events if isinstance(event, FeedbackEvent)]
    assert len({event.session_id for event in completions}) == SESSIONS
    assert len(judgements) == SESSIONS
    assert sum(event.finish_reason == "tool_calls" for event in completions) == report["calls_first50"]
