"""The SGLang client against a local server that keeps to the protocol: requests, streams, aborts,
spans across updates, proofs, and every way in which a server can be wrong."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from miles import ConfigError, Context, EngineError, Request, Sampling, Settings, WeightSyncError
from miles_plugins.engine.sglang import Sglang, http


def _beside(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


native = _beside("native_server")


class Moe:
    """A registration of a model with experts, as far as an engine looks."""

    def hf_config(self) -> dict[str, Any]:
        return {"num_experts_per_tok": 2}

    def directory(self) -> None:
        return None


@pytest.fixture
def play(tmp_path):
    """Run a coroutine function of (client, server) against a server that is up."""

    def run(function, *, settings=None, info=None, model=None, **config):
        async def main():
            (tmp_path / "key").write_text(native.KEY + "\n")
            server = native.NativeServer(**(info or {}))
            async with server.up() as url:
                made = Sglang.Config(url=url, api_key_file=str(tmp_path / "key"), **config)
                around = Context(directory=tmp_path, settings=settings or Settings(), model=model)
                client = Sglang(made, around)
                try:
                    async with asyncio.timeout(20):
                        return await function(client, server)
                finally:
                    await client.close()

        return asyncio.run(main())

    return run


def _request(new: int = 12, index: int = 0, **changes: Any) -> Request:
    tokens = np.arange(40, 50, dtype=np.int32)
    sampling = Sampling(max_new_tokens=new, **changes)
    key = f"g{index}.0"
    return Request(id=f"{key}/0", key=key, tokens=tokens, sampling=sampling, seed=2**40 + 5)


async def _running(server: Any, count: int, tokens: int = 5) -> None:
    """Until so many requests have so many tokens more than now."""
    had = {id(job): len(job.tokens) for job in server.jobs.values()}

    def moved() -> int:
        jobs = server.jobs.values()
        return sum(len(job.tokens) >= had.get(id(job), 0) + tokens for job in jobs)

    while moved() < count:
        await asyncio.sleep(0.001)


def _exact(made: Any) -> None:
    """The version of every token is the one whose weights drew it."""
    for span in made.spans:
        drawn = {float(p) for p in made.logprobs[span.start : span.stop]}
        assert drawn == {native.logprob(span.version)}, made.spans


# ---------------------------------------------------------------- requests


def test_sglang_samples_what_the_server_says(play):
    async def check(client, server):
        server.weight_version = "4"
        made = await client.generate(_request(stop_ids=(3,), top_k=5))
        body = server.bodies[-1]
        assert len(made.tokens) == 12
        assert [(s.start, s.stop, s.version) for s in made.spans] == [(0, 12, 4)]
        assert (made.finish, made.cached_tokens) == ("length", 2)
        params = body["sampling_params"]
        assert params["stop_token_ids"] == [3]
        assert (params["top_k"], params["no_stop_trim"]) == (5, True)
        assert params["skip_special_tokens"] is False
        assert body["return_logprob"] is True
        assert await client.version() == 4

    play(check)


@pytest.mark.parametrize("incremental", [False, True])
def test_sglang_streams_the_same_completion(play, incremental):
    async def check(client, server):
        server.incremental = incremental
        whole = await client.generate(_request(30))
        parts = [part async for part in client.stream(_request(30))]
        assert len(parts) > 4
        assert np.concatenate(parts[:-1]).tolist() == parts[-1].tokens.tolist()
        assert parts[-1].tokens.tolist() == whole.tokens.tolist()
        assert parts[-1].logprobs.tolist() == whole.logprobs.tolist()
        assert parts[-1].spans == whole.spans

    play(check, stream_interval=3)


def test_sglang_stops_at_a_stop_id_and_keeps_it(play):
    async def check(client, server):
        whole = await client.generate(_request(30))
        made = await client.generate(_request(30, stop_ids=(int(whole.tokens[8]),)))
        assert (made.finish, made.tokens.tolist()) == ("stop", whole.tokens[:9].tolist())

    play(check)


def test_sglang_scores(play):
    async def check(client, server):
        tokens = np.array([5, 9, 200, 9], np.int32)
        scored = await client.score(tokens)
        assert scored.dtype == np.float32
        assert scored.tolist() == [0.0, -1.0, -1.0, -1.0]

    play(check)


def test_sglang_abort_ends_requests_of_a_key(play):
    async def check(client, server):
        task = asyncio.create_task(client.generate(_request(100000)))
        await _running(server, 1)
        assert await client.abort(["another"]) == 0
        assert await client.abort(["g0.0"]) == 1
        assert (await task).finish == "abort"
        assert server.aborted == [server.bodies[0]["rid"]]
        assert (await client.health())["active"] == 0

    play(check)


@pytest.mark.parametrize("how", ["cancel", "leave a stream", "time out"])
def test_sglang_aborts_what_nobody_waits_for(play, how):
    async def check(client, server):
        if how == "cancel":
            task = asyncio.create_task(client.generate(_request(100000)))
            await _running(server, 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "time out":
            await client.version()
            with pytest.raises(EngineError, match=r"no answer in 0\.3 s"):
                await client.generate(_request(100000))
        else:
            stream = client.stream(_request(100000))
            async for _ in stream:
                break
            await stream.aclose()
        assert server.aborted == [server.bodies[0]["rid"]]

    play(check, timeout_s=0.3 if how == "time out" else 20.0)


def test_sglang_abort_that_is_not_answered_is_heard_of_by_nobody(play, caplog):
    """It outlives a caller that is cancelled twice, and its error is then nobody's: it must not
    come up in the log as a task that was never asked."""

    async def check(client, server):
        server.silent.add("/abort_request")
        task = asyncio.create_task(client.generate(_request(100000)))
        await _running(server, 1)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.05)
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.4)
        gc.collect()

    play(check, connect_s=0.3)
    assert "never retrieved" not in caplog.text


def test_sglang_gives_the_rank_of_the_key(play):
    async def check(client, server):
        assert (await client.health())["dp_ranks"] == 4
        assert client.dp_ranks == 4
        await client.generate(replace(_request(), dp_rank=3))
        assert server.bodies[-1]["routed_dp_rank"] == 3

    play(check, info={"dp_size": 4})


def test_sglang_experts_are_of_the_forward_that_sampled_each_token(play):
    async def check(client, server):
        made = await client.generate(replace(_request(6), want_experts=True))
        assert server.bodies[-1]["routed_experts_start_len"] == 9
        assert (made.experts.shape, made.experts.dtype) == ((6, 3, 2), np.uint8)
        assert made.experts.reshape(-1).tolist() == [i % 7 for i in range(36)]

    play(check, info={"enable_return_routed_experts": True}, model=Moe())


def test_sglang_experts_of_a_server_that_has_none_are_an_error(play):
    async def check(client, server):
        with pytest.raises(EngineError, match="--enable-return-routed-experts"):
            await client.generate(replace(_request(), want_experts=True))

    play(check, model=Moe())


def test_sglang_counts_what_was_speculated(play):
    async def check(client, server):
        server.extra = {"spec_verify_ct": 4, "spec_draft_token_num": 12, "spec_accept_token_num": 8}
        await client.generate(_request())
        server.extra = {"spec_verify_ct": 1, "spec_num_proposed_drafts": 3}
        await client.generate(_request())
        health = await client.health()
        found = [health[name] for name in ("verified", "drafted", "accepted")]
        assert found == [5, 15, 8]

    play(check)


def test_sglang_counts(play):
    async def check(client, server):
        made = await client.generate(_request(9))
        client._watch.alive_at = float("-inf")
        health = await client.health()
        assert health["tokens"] == len(made.tokens)
        assert (health["prompt_tokens"], health["cached_tokens"]) == (10, 2)
        assert (health["waiting"], health["kv_used"], health["max_len"]) == (6, 0.25, 251)
        assert health["busy_s"] > 0

    play(check)


# ---------------------------------------------------------------- versions and updates


def test_sglang_version_of_a_fresh_or_older_server(play):
    async def check(client, server):
        assert await client.version() == 0
        server.old_names, server.weight_version = True, "17"
        assert await client.version() == 17
        assert (await client.generate(_request())).spans[0].version == 17

    play(check)


def test_sglang_weights_that_others_change_leave_the_older_version(play):
    async def check(client, server):
        server.tells_spans = False
        server.weight_version = "1"
        await client.generate(_request())
        server.weight_version = "2"
        between, after = [await client.generate(_request()) for _ in range(2)]
        assert between.spans[0].version == 1
        assert after.spans[0].version == 2

    play(check)


@pytest.mark.parametrize("streamed", ["", "repeating", "incremental"])
@pytest.mark.parametrize("tells_spans", [True, False])
@pytest.mark.parametrize("overlapped", [True, False])
@pytest.mark.parametrize("pause", ["in_place", "retract", "abort"])
def test_sglang_spans_are_exact_across_an_update(
    play, checkpoint, pause, overlapped, tells_spans, streamed
):
    """Log-probs say which weights drew a token; none may be lost, none have another's version."""

    async def whole(client, request):
        if not streamed:
            return await client.generate(request)
        items = [item async for item in client.stream(request)]
        if len(items) > 1:
            assert np.concatenate(items[:-1]).tolist() == items[-1].tokens.tolist()
        return items[-1]

    async def check(client, server):
        server.tells_spans, server.incremental = tells_spans, streamed == "incremental"
        await client.load_directory(1, checkpoint)
        await client.generate(_request(2))
        tasks = [asyncio.create_task(whole(client, _request(60, i))) for i in range(8)]
        for version in (2, 3):
            if pause != "abort" or version == 2:  # there are none left after it
                await _running(server, 8)
            await client.load_directory(version, checkpoint)
            assert await client.version() == version
        done = await asyncio.gather(*tasks)
        for made in done:
            _exact(made)
            if pause != "abort":
                assert (made.finish, len(made.tokens)) == ("length", 60)
                assert [span.version for span in made.spans] == [1, 2, 3]
        if pause == "abort":
            assert {made.finish for made in done} == {"abort"}
        late = await client.generate(_request(5))
        assert [span.version for span in late.spans] == [3]
        kept = pause == "in_place" and tells_spans and not overlapped
        modes = [body["mode"] for path, body in server.asked if path == "/pause_generation"]
        native_retract = pause == "retract" and tells_spans
        assert modes[1] == ("in_place" if kept else "retract" if native_retract else "abort")
        flushed = [b["flush_cache"] for p, b in server.asked if p == "/update_weights_from_disk"]
        assert flushed[-1] is (not kept)
        salts = {
            body.get("extra_key", "") for body in server.bodies if "sampling_seed" in str(body)
        }
        assert ("miles-3" in salts) is kept

    info = {"disable_overlap_schedule": not overlapped}
    play(check, settings=Settings(pause=pause, max_lag=2), info=info)


@pytest.mark.parametrize("together", [1, 32])
def test_sglang_requests_that_are_cut_have_ended_when_the_server_is_paused(
    play, checkpoint, together
):
    """Else a pause would wait a second for them to end: four of eight did."""

    async def check(client, server):
        server.tells_spans = False
        await client.load_directory(1, checkpoint)
        tasks = [asyncio.create_task(client.generate(_request(60, i))) for i in range(8)]
        await _running(server, 8)
        await client.load_directory(2, checkpoint)
        for made in await asyncio.gather(*tasks):
            _exact(made)
            assert (made.finish, len(made.tokens)) == ("length", 60)
        assert server.at_pause == [0, 0]

    play(check, together=together)


@pytest.mark.parametrize("together", [1, 32])
def test_sglang_requests_that_an_update_aborts_do_not_make_it_wait_a_second(
    play, checkpoint, together
):
    async def check(client, server):
        await client.load_directory(1, checkpoint)
        tasks = [asyncio.create_task(client.generate(_request(60, i))) for i in range(8)]
        await _running(server, 8)
        await client.load_directory(2, checkpoint)
        assert {made.finish for made in await asyncio.gather(*tasks)} == {"abort"}
        assert server.at_pause == [0, 0]

    play(check, settings=Settings(pause="abort"), together=together)


@pytest.mark.parametrize("pause", ["retract", "abort"])
def test_sglang_answers_while_it_is_asked_for_its_layout(play, pause):
    """It was asked between the last token of the old weights and the first of the new."""

    async def check(client, server):
        await client.version()
        task = asyncio.create_task(client.generate(_request(60)))
        await _running(server, 1)
        async with client.updating(1):
            pass
        await task
        paths = [path for path, _ in server.asked]
        last = len(paths) - 1 - paths[::-1].index("/server_info")
        assert last < paths.index("/abort_request") < paths.index("/pause_generation")

    play(check, settings=Settings(pause=pause))


def test_sglang_does_not_use_a_connection_that_the_server_is_about_to_close(play, monkeypatch):
    """A request got no answer where it was the first in five seconds on its connection."""
    assert http.IDLE_S < 5  # as SGLang's
    monkeypatch.setattr(http, "IDLE_S", 0.05)

    async def check(client, server):
        await client.generate(_request())
        await asyncio.sleep(0.2)
        await client.generate(_request())
        assert len(server.peers) == 2

    play(check)


def test_sglang_requests_of_the_meantime_wait_for_the_new_weights(play, checkpoint):
    async def check(client, server):
        await client.load_directory(1, checkpoint)
        loading = asyncio.create_task(client.load_directory(2, checkpoint))
        await asyncio.sleep(0)
        made = await client.generate(_request())
        await loading
        _exact(made)

    play(check)


def test_sglang_does_not_score_at_a_temperature_that_servers_do_not_score_at(play):
    async def check(client, server):
        with pytest.raises(EngineError, match=r"temperature is 0\.7, and servers score"):
            await client.score(np.arange(1, 5, dtype=np.int32))
        assert not server.bodies

    play(check, settings=replace(Settings(), temperature=0.7))


def test_sglang_server_that_no_update_fits_goes_on_as_it_was(play):
    async def check(client, server):
        server.weight_version = "4"
        with pytest.raises(WeightSyncError, match="replicas within one server"):
            async with client.updating(5):
                raise AssertionError("it was refused")
        assert not server.paused
        assert "/pause_generation" not in [path for path, _ in server.asked]
        made = await client.generate(_request())
        assert [(s.start, s.stop, s.version) for s in made.spans] == [(0, 12, 4)]

    play(check, info={"dp_size": 2})


def test_sglang_refuses_a_directory_before_anything_changes(play, checkpoint, tmp_path):
    async def check(client, server):
        await client.load_directory(1, checkpoint)
        with pytest.raises(WeightSyncError, match=r"has no config\.json"):
            await client.load_directory(2, tmp_path / "nothing")
        assert await client.version() == 1
        assert not server.paused
        assert (await client.generate(_request())).spans[0].version == 1

    play(check)


def test_sglang_failed_update_leaves_an_engine_that_says_so(play, checkpoint):
    async def check(client, server):
        await client.load_directory(1, checkpoint)
        task = asyncio.create_task(client.generate(_request(1000)))
        await _running(server, 1)
        server.update_fault = "CUDA out of memory"
        with pytest.raises(WeightSyncError, match="CUDA out of memory"):
            await client.load_directory(2, checkpoint)
        with pytest.raises(EngineError, match="cannot be used"):
            await task  # it was cut, and there is nothing to go on with
        for call in (client.version(), client.health(), client.generate(_request())):
            with pytest.raises(EngineError, match=r"cannot be used: .*CUDA out of memory"):
                await call

    play(check)


def test_sglang_proof_finds_tensors_that_the_files_do_not_hold(play, checkpoint):
    async def check(client, server):
        server.untouched = {"t1"}
        with pytest.raises(WeightSyncError, match=r"1 of 3 tensors do not come from the files: t1"):
            await client.load_directory(1, checkpoint)

    play(check)


def test_sglang_restarted_server_is_compared_with_what_the_same_files_gave_before(
    play, checkpoint, tmp_path
):
    async def right(client, server):
        await client.load_directory(1, checkpoint)
        assert await client.checksums() == dict.fromkeys(server.tensors, "of 1")

    async def wrong(client, server):
        with pytest.raises(WeightSyncError, match="differ from what another server made"):
            await client.load_directory(2, checkpoint)  # whose checksums say 2, of the same bytes

    play(right)
    assert len(list((tmp_path / "engines" / "checksums").glob("*.json"))) == 1
    play(right)
    play(wrong)


def test_sglang_loads_tensors_through_files(play, tmp_path):
    torch = pytest.importorskip("torch")
    gone = []

    async def check(client, server):
        await client.load(3, [("a", torch.ones(2)), ("b", torch.zeros(3))])
        assert await client.version() == 3
        path = next(b["model_path"] for p, b in server.asked if p == "/update_weights_from_disk")
        gone.append(Path(path))
        with pytest.raises(WeightSyncError, match="a came twice"):
            await client.load(4, [("a", torch.ones(2)), ("a", torch.ones(2))])

    play(check, model=Moe())
    assert not gone[0].exists()


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("twist", "message"),
    [
        (
            lambda r: r["meta_info"]["output_token_logprobs"].pop(),
            r"11 log-probs for 12 tokens",
        ),
        (lambda r: r.update(output_ids=[1] * 12), "are not the tokens of the log-probs"),
        (lambda r: r["meta_info"].update(completion_tokens=13), "completion_tokens is 13"),
        (lambda r: r["meta_info"].pop("output_token_logprobs"), "no output_token_logprobs"),
        (lambda r: r["meta_info"].update(finish_reason={"type": "odd"}), "finish_reason"),
        (
            lambda r: r["meta_info"].update(
                finish_reason={"type": "abort", "status_code": 500, "message": "scheduler died"}
            ),
            "HTTP 500: scheduler died",
        ),
        (
            lambda r: r["meta_info"]["weight_versions"][0].update(end=7),
            "do not tile 12 tokens",
        ),
        (
            lambda r: r["meta_info"]["output_token_logprobs"][4].__setitem__(0, float("nan")),
            "log-prob 4 is no number|no object",
        ),
    ],
)
def test_sglang_replies_that_contradict_themselves_are_engine_errors(play, twist, message):
    async def check(client, server):
        server.twist = twist
        with pytest.raises(EngineError, match=message):
            await client.generate(_request())

    play(check)


def test_sglang_takes_an_aborted_stream_that_repeats_only_its_last_id(play):
    """As 0.5.16 ends one that was put back to wait: all log-probs, and one of the ids."""

    def twist(reply):
        reply["output_ids"] = reply["output_ids"][-1:]
        reply["meta_info"]["finish_reason"] = {"type": "abort", "message": "in waiting queue"}

    async def check(client, server):
        server.twist = twist
        made = await client.generate(_request())
        assert (made.finish, len(made.tokens)) == ("abort", 12)

    play(check)


@pytest.mark.parametrize("status", [400, 500, 503])
def test_sglang_says_what_the_server_refused(play, status):
    async def check(client, server):
        server.fault = status, "The input is too long"
        with pytest.raises(EngineError, match=rf"HTTP {status}.*The input is too long"):
            await client.generate(_request())

    play(check)


def _one_log_prob_less(reply):
    reply["meta_info"]["output_token_logprobs"].pop()


@pytest.mark.parametrize("how", ["fault", "twist", "streamed"])
def test_sglang_server_of_ours_that_answers_nothing_well_is_unwell(play, how):
    """It says that it is well, so that nobody else would start it again."""

    async def ask(client, index):
        if how != "streamed":
            return await client.generate(_request(index=index))
        return [part async for part in client.stream(_request(index=index))]

    async def check(client, server):
        ours = SimpleNamespace(lost=str, close=lambda: None, wait=lambda limit: None)

        async def fail(count):
            server.fault = (500, "no kernel image") if how != "twist" else None
            server.twist = _one_log_prob_less if how == "twist" else None
            for index in range(count):
                with pytest.raises(EngineError):
                    await ask(client, index)
            server.fault = server.twist = None

        await fail(7)
        await ask(client, 7)  # a good answer
        await fail(7)
        client._watch._server = ours
        await client.health()
        await fail(12)
        assert len(client._asking._failed) == 8  # of a server that fails for days, too
        said = (
            r"none of its last answers, to 8 routing keys and more, was good: .*(HTTP 500|log-prob)"
        )
        for call in (client.version, client.health):
            with pytest.raises(EngineError, match=said):
                await call()
        client._watch._server = None  # one that others run cannot be started again
        await client.health()

    play(check, together=1)


def test_sglang_server_that_refuses_many_requests_is_well(play):
    async def check(client, server):
        for status in (400, 404, 413, 422, 429):
            server.fault = status, "too long"
            for index in range(9):
                with pytest.raises(EngineError):
                    await client.generate(_request(index=index))
        assert not client._asking.failing()

    play(check, together=1)


def test_sglang_server_that_hangs_in_a_pause_is_not_waited_for_as_for_weights(play, monkeypatch):
    monkeypatch.setattr("miles_plugins.engine.sglang.publishing._SOON_S", 0.2)

    async def check(client, server):
        server.silent = {"/pause_generation", "/continue_generation"}
        with pytest.raises(EngineError, match=r"/pause_generation: no answer in 0\.2 s"):
            await client.pause()
        with pytest.raises(EngineError, match=r"/continue_generation: no answer in 0\.2 s"):
            await client.resume()

    play(check)


def test_sglang_scheduler_that_hangs_makes_the_engine_unwell(play):
    async def check(client, server):
        await client.health()
        server.silent = {"/server_info"}
        client._watch.alive_at = float("-inf")
        for call in (client.version, client.health):
            with pytest.raises(EngineError, match=r"/server_info: no answer in 0\.2 s"):
                await call()

    play(check, silent_s=0.2)


def test_sglang_refuses_what_it_cannot_do(play, tmp_path):
    with pytest.raises(ConfigError, match=r"url is empty.*engine\.url=http"):
        Sglang(Sglang.Config(), Context(directory=tmp_path))
    with pytest.raises(ConfigError, match="url is 'here'"):
        Sglang(Sglang.Config(url="here"), Context(directory=tmp_path))

    async def check(client, server):
        with pytest.raises(EngineError, match="no routing key"):
            await client.generate(replace(_request(), key=""))
        with pytest.raises(EngineError, match="--enable-memory-saver"):
            await client.sleep()

    play(check)


def test_sglang_frees_memory_by_tag(play):
    async def check(client, server):
        await client.sleep(("kv_cache",))
        await client.wake(("kv_cache",))
        assert ("/release_memory_occupation", {"tags": ["kv_cache"]}) in server.asked
        paths = [path for path, _ in server.asked]  # it computes nothing when memory is taken
        assert paths.index("/flush_cache") < paths.index("/release_memory_occupation")
        assert ("/resume_memory_occupation", {"tags": ["kv_cache"]}) in server.asked

    play(check, info={"enable_memory_saver": True})


def test_sglang_pauses_in_every_way_and_flushes(play):
    async def check(client, server):
        for mode in ("in_place", "retract"):
            await client.pause(mode)
            assert server.paused
            await client.resume()
        task = asyncio.create_task(client.generate(_request(100000)))
        await _running(server, 1)
        await client.pause("abort")
        assert (await task).finish == "abort"
        await client.flush()
        assert server.paused
        await client.resume()
        assert not server.paused

    play(check)


def test_sglang_without_a_server_is_an_engine_error(tmp_path):
    async def check():
        client = Sglang(
            Sglang.Config(url="http://127.0.0.1:9", connect_s=2.0, start_timeout_s=0.1),
            Context(directory=tmp_path),
        )
        try:
            with pytest.raises(EngineError, match=r"GET http://127\.0\.0\.1:9/.*_info: Client"):
                await client.generate(_request())
        finally:
            await client.close()

    asyncio.run(check())


def test_sglang_engines_of_one_run_take_an_address_each(tmp_path):
    async def check():
        config = Sglang.Config(url="http://127.0.0.1:9, http://127.0.0.1:10", workers=2)
        around = Context(directory=tmp_path)
        one, two = Sglang(config, around), Sglang(config, around)
        assert {one._http.url, two._http.url} == {"http://127.0.0.1:9", "http://127.0.0.1:10"}
        await one.close()
        again = Sglang(config, around)  # as one that was started again
        assert again._http.url == one._http.url
        await asyncio.gather(two.close(), again.close())

    asyncio.run(check())


def test_sglang_prompts_are_computed_by_the_server_of_the_pair(tmp_path):
    async def check():
        (tmp_path / "key").write_text(native.KEY)
        prefill = native.NativeServer(disaggregation_mode="prefill")
        prefill.info["disaggregation_bootstrap_port"] = 8123
        decode = native.NativeServer(disaggregation_mode="decode")
        async with prefill.up() as first, decode.up() as second:
            config = Sglang.Config(
                url=second, prefill_url=first, api_key_file=str(tmp_path / "key")
            )
            client = Sglang(config, Context(directory=tmp_path))
            made = await client.generate(_request())
            assert len(made.tokens) == 12
            one, two = prefill.bodies[0], decode.bodies[0]
            assert one["bootstrap_room"] == two["bootstrap_room"]
            assert (one["bootstrap_host"], one["bootstrap_port"]) == ("127.0.0.1", 8123)
            prefill.fault = 500, "no room"
            with pytest.raises(EngineError, match="no room"):
                await client.generate(_request())
            await client.close()

    asyncio.run(check())


def test_a_server_of_others_that_is_away_is_waited_for(tmp_path, caplog):
    """Whoever runs it may be starting it again; a server that does not come back is an error."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]

    def client(**keys):
        config = Sglang.Config(
            url=f"http://127.0.0.1:{port}", api_key_file=str(tmp_path / "key"), **keys
        )
        return Sglang(config, Context(directory=tmp_path))

    async def check():
        (tmp_path / "key").write_text(native.KEY)
        impatient = client(start_timeout_s=0.2)
        with pytest.raises(EngineError, match="Cannot connect to host"):
            await impatient.generate(_request())
        await impatient.close()
        patient = client(start_timeout_s=20)
        asked = asyncio.create_task(patient.generate(_request()))
        await asyncio.sleep(0.6)
        assert not asked.done()
        async with native.NativeServer().up(port):
            assert len((await asked).tokens) == 12
        await patient.close()

    asyncio.run(check())
    assert "waiting for a server, at most 20 s (start_timeout_s): " in caplog.text
