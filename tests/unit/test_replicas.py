"""Replicas: who serves what, and that one that is dead, slow or wrong holds up nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from app.engines import replicas as module
from app.engines.base import Chunk, GenerateRequest
from app.engines.replicas import Replicas
from app.errors import AdapterRejected, Unavailable
from app.events.schema import Sampling
from tests.scripted_vllm import ScriptedVllm, adapter

REQUEST = GenerateRequest(messages=[{"role": "user", "content": "Hi"}], sampling=Sampling(temperature=1, max_tokens=8))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks and patience in hundredths of a second, and adapters whose files are in order."""
    monkeypatch.setattr(module, "CHECK_S", 0.01)
    monkeypatch.setattr(module, "STRAGGLER_S", 0.05)
    monkeypatch.setattr("app.engines.vllm.check_adapter", lambda *_: None)


@pytest.fixture
def servers() -> list[ScriptedVllm]:
    return [ScriptedVllm("a"), ScriptedVllm("b")]


@asynccontextmanager
async def running(servers: list[ScriptedVllm], store: Path, slots: int = 4) -> AsyncIterator[Replicas]:
    engine = Replicas([server.client(store, slots) for server in servers], slots)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def answer(engine: Replicas, version: int = 0, affinity: str | None = None) -> list[Chunk]:
    request = GenerateRequest(REQUEST.messages, REQUEST.sampling, affinity=affinity)
    async with aclosing(engine.generate(request, version)) as chunks:
        return [chunk async for chunk in chunks]


async def until(true: object) -> None:
    """Wait until a call gives true."""
    async with asyncio.timeout(10):
        while not true():  # type: ignore[operator]
            await asyncio.sleep(0.005)


def serving(engine: Replicas) -> list[bool]:
    return [state.serving for state in engine.states()]


async def test_a_version_is_loaded_everywhere(servers: list[ScriptedVllm], tmp_path: Path) -> None:
    """After a load every server has it; after an unload none has."""
    async with running(servers, tmp_path) as engine:
        await engine.load(adapter(tmp_path, 1))
        assert [list(server.names) for server in servers] == [["riacho@1"]] * 2
        assert engine.loaded() == {1}
        await engine.unload(1)
        assert [server.names for server in servers] == [{}, {}]
        assert not engine.may_read(1)


async def test_requests_go_to_the_least_loaded(servers: list[ScriptedVllm], tmp_path: Path) -> None:
    """While one has a request under way, the next goes to the other."""
    for server in servers:
        server.gate = asyncio.Event()
    async with running(servers, tmp_path) as engine:
        tasks = [asyncio.create_task(answer(engine)) for _ in range(4)]
        await until(lambda: sum(len(server.answered) for server in servers) == 4)
        assert [len(server.answered) for server in servers] == [2, 2]
        for server in servers:
            server.gate.set()  # type: ignore[union-attr]
        await asyncio.gather(*tasks)
        assert [state.running for state in engine.states()] == [0, 0]


async def test_a_session_stays_with_its_replica(servers: list[ScriptedVllm], tmp_path: Path) -> None:
    """All turns of one session go to one server, whose prefix cache knows it; sessions spread over both."""
    async with running(servers, tmp_path) as engine:
        for session in range(20):
            before = [len(server.answered) for server in servers]
            for _ in range(3):
                await answer(engine, affinity=f"s{session}")
            gained = [len(server.answered) - was for server, was in zip(servers, before, strict=True)]
            assert sorted(gained) == [0, 3]
        assert all(server.answered for server in servers)


async def test_a_busy_replica_gives_its_session_away(servers: list[ScriptedVllm], tmp_path: Path) -> None:
    """Affinity ends where the session's server has many more requests than the other."""
    for server in servers:
        server.gate = asyncio.Event()
    async with running(servers, tmp_path) as engine:
        tasks = [asyncio.create_task(answer(engine, affinity="s")) for _ in range(30)]
        await until(lambda: sum(len(server.answered) for server in servers) == 30)
        counts = sorted(len(server.answered) for server in servers)
        assert counts[1] - counts[0] <= module.AFFINITY_SLACK + 1
        for server in servers:
            server.gate.set()  # type: ignore[union-attr]
        await asyncio.gather(*tasks)


@pytest.mark.parametrize("dies_at", [0, 1])
async def test_before_the_first_token_another_takes_over(
    servers: list[ScriptedVllm], tmp_path: Path, dies_at: int
) -> None:
    """A server that breaks off before it has given a token costs the client nothing."""
    servers[0].dies_at = dies_at
    async with running(servers, tmp_path) as engine:
        for _ in range(4):
            chunks = await answer(engine)
            assert [token for chunk in chunks for token in chunk.token_ids] == [5, 6]
            assert [chunk.prompt_ids for chunk in chunks if chunk.prompt_ids] == [(1, 2)]


async def test_after_the_first_token_nobody_takes_over(servers: list[ScriptedVllm], tmp_path: Path) -> None:
    """What was begun is not begun again: the client hears of the loss."""
    for server in servers:
        server.dies_at = 2
    async with running(servers, tmp_path) as engine:
        with pytest.raises(Unavailable, match="lost"):
            await answer(engine)
        assert sum(len(server.answered) for server in servers) == 1


async def test_a_refusal_on_one_undoes_all(servers: list[ScriptedVllm], tmp_path: Path) -> None:
    """The reason comes through, no server keeps the version, and all stay in service."""
    servers[1].refuse = "rank too large"
    async with running(servers, tmp_path) as engine:
        with pytest.raises(AdapterRejected, match="rank too large"):
            await engine.load(adapter(tmp_path, 1))
        assert [server.names for server in servers] == [{}, {}]
        assert engine.loaded() == frozenset()
        assert serving(engine) == [True, True]


async def test_an_adapter_that_one_server_ignores_is_rejected(servers: list[ScriptedVllm], tmp_path: Path) -> None:
    """The probe is asked of every server, and its numbers are in the reason."""
    servers[1].ignores = True
    async with running(servers, tmp_path) as engine:
        with pytest.raises(AdapterRejected, match=r"2 nats"):
            await engine.load(adapter(tmp_path, 1))
        assert [server.names for server in servers] == [{}, {}]


async def test_a_slow_server_holds_up_nothing(servers: list[ScriptedVllm], tmp_path: Path) -> None:
    """The version goes live on the other; the slow one is out until it has loaded too."""
    servers[1].hang = asyncio.Event()
    async with running(servers, tmp_path) as engine:
        await engine.load(adapter(tmp_path, 1))
        assert engine.loaded() == {1}
        assert serving(engine) == [True, False]
        await answer(engine, 1)
        servers[1].hang.set()
        await until(lambda: serving(engine) == [True, True])
        assert "riacho@1" in servers[1].names


async def test_a_dead_server_comes_back_with_what_is_wanted(servers: list[ScriptedVllm], tmp_path: Path) -> None:
    """It is out while it is away; back, it first loads what went live meanwhile and drops what is gone."""
    async with running(servers, tmp_path) as engine:
        await engine.load(adapter(tmp_path, 1))
        servers[1].down = True
        await until(lambda: serving(engine) == [True, False])
        await engine.load(adapter(tmp_path, 2))
        await engine.unload(1)
        assert engine.may_read(1), "the server that is away may have it still"
        servers[1].down = False
        await until(lambda: serving(engine) == [True, True])
        assert list(servers[1].names) == ["riacho@2"]
        assert not engine.may_read(1)


@pytest.mark.parametrize("begun", [False, True], ids=["before the first token", "after it"])
async def test_a_frozen_server_does_not_keep_its_requests(
    servers: list[ScriptedVllm], tmp_path: Path, begun: bool
) -> None:
    """Once it is found silent, what had no token yet goes elsewhere, and what had one is told of the loss."""
    for server in servers:
        server.gate_at = 2 if begun else 1
        server.gate = asyncio.Event()
    async with running(servers, tmp_path) as engine:
        tasks = [asyncio.create_task(answer(engine)) for _ in range(2)]
        await until(lambda: all(server.answered for server in servers))
        servers[1].gate.set()  # type: ignore[union-attr]
        await until(lambda: sum(task.done() for task in tasks) == 1)
        servers[0].frozen = True
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert serving(engine) == [False, True]
        assert sum(isinstance(end, Unavailable) for end in ends) == begun
        assert len(servers[1].answered) == (1 if begun else 2)


async def test_a_version_that_a_server_lost_is_loaded_for_the_request(
    servers: list[ScriptedVllm], tmp_path: Path
) -> None:
    """A restart between two checks costs no request."""
    async with running(servers[:1], tmp_path) as engine:
        await engine.load(adapter(tmp_path, 1))
        servers[0].names.clear()
        assert (await answer(engine, 1))[-1].finish_reason == "stop"
        assert servers[0].answered == ["riacho@1"]


async def test_none_in_service_is_said(servers: list[ScriptedVllm], tmp_path: Path) -> None:
    """Requests and loads get the addresses and what is wrong there."""
    async with running(servers, tmp_path) as engine:
        for server in servers:
            server.down = True
        await until(lambda: serving(engine) == [False, False])
        assert not await engine.healthy()
        with pytest.raises(Unavailable, match=r"http://a: .*http://b: "):
            await answer(engine)
        with pytest.raises(Unavailable, match="No engine is in service"):
            await engine.load(adapter(tmp_path, 1))
        assert engine.loaded() == frozenset()


async def test_one_server_is_enough_to_start(servers: list[ScriptedVllm], tmp_path: Path) -> None:
    """What both hold at the start stays; a server that is away comes later."""
    for server in servers:
        server.names["riacho@1"] = str(adapter(tmp_path, 1).path)
    async with running(servers, tmp_path) as engine:
        assert engine.loaded() == {1}
    servers[1].names["riacho@2"] = str(adapter(tmp_path, 2).path)
    async with running(servers, tmp_path) as engine:
        assert engine.loaded() == {1}
        assert list(servers[1].names) == ["riacho@1"]
