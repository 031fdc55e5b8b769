"""Servers of our own: started with the flags of the config, and ended whatever happens to who
started them. The server is a small program that says it is SGLang."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from miles import ConfigError, Context, EngineError, Gpu, Settings, Spec, gpus_shown
from miles_plugins.engine.sglang import Sglang, checks, command, facts, server

PROGRAM = textwrap.dedent(
    """
    import http.server, json, os, subprocess, sys, time
    words = sys.argv[1:]
    given = dict(zip(words, words[1:]))
    if "--die" in words:
        print("CUDA out of memory: everything is full", flush=True)
        sys.exit(3)
    key = open(given["--config"]).read().split(": ")[1].strip()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(given["--model-path"] + "/pids", "w").write(f"{os.getpid()} {child.pid}")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if self.headers["Authorization"] != "Bearer " + key:
                self.send_response(401)
                return self.end_headers()
            said = {"version": "0.5.23", "max_req_input_len": 99, "dp_size": 1}
            text = json.dumps(said).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    http.server.ThreadingHTTPServer(("127.0.0.1", int(given["--port"])), Handler).serve_forever()
    """
)


class Model:
    """A registration without a checkpoint."""

    def hf_config(self):
        return {"hidden_size": 8}

    def directory(self):
        return None


@pytest.fixture
def python(tmp_path):
    """An interpreter that says it has SGLang, and runs the program instead."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    path = tmp_path / "python"
    path.write_text(
        f'#!/bin/sh\ncase "$*" in *importlib.metadata*) echo 0.5.23; exit;; esac\n'
        f'shift 2\nexec {sys.executable} {program} "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def around(tmp_path):
    """What a run gives."""
    precision = SimpleNamespace(engine="float32", logits="float32")
    return Context(directory=tmp_path / "run", model=Model(), precision=precision)


def _config(python, **more):
    return Sglang.Config(**{"python": python, "device": "cpu", "start_timeout_s": 30.0, **more})


def _pids(directory):
    return [int(pid) for pid in (directory / "engines" / "model" / "pids").read_text().split()]


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _gone(pids, seconds=8.0):
    end = time.monotonic() + seconds
    while any(map(_alive, pids)):
        assert time.monotonic() < end, [pid for pid in pids if _alive(pid)]
        time.sleep(0.05)


def test_server_is_started_recorded_and_ended(python, around):
    async def check():
        engine = Sglang(_config(python, environment={"SOME_SWITCH": "1"}, tp=2), around)
        assert await engine.version() == -1
        health = await engine.health()
        assert health["max_len"] == 100
        said = json.loads((around.directory / "engines" / "sglang-0.json").read_text())
        assert said["sglang"] == "0.5.23"
        assert said["environment"] == {"SGLANG_USE_CPU_ENGINE": "1", "SOME_SWITCH": "1"}
        words = said["command"]
        assert words[1:3] == ["-m", "sglang.launch_server"]
        assert words[words.index("--tp-size") + 1] == "2"
        assert engine._server.key not in json.dumps(said)
        # one in 64 began with "-": "argument --api-key: expected one argument"
        assert re.fullmatch("[0-9a-f]{48}", engine._server.key)
        key = around.directory / "engines" / "sglang-0.key.yaml"
        assert key.stat().st_mode & 0o077 == 0
        assert engine._server.log.stat().st_mode & 0o077 == 0  # the server writes its key there
        with pytest.raises(EngineError, match="no weights yet"):
            await engine.score(None)
        pids = _pids(around.directory)
        assert all(map(_alive, pids))
        await engine.close()
        return pids

    _gone(asyncio.run(check()))


def test_servers_of_a_run_draw_from_seeds_of_their_own(python, around):
    async def seeds():
        engines = [Sglang(_config(python), around) for _ in range(2)]
        said = [around.directory / "engines" / f"sglang-{slot}.json" for slot in range(2)]
        words = [json.loads(record.read_text())["command"] for record in said]
        for engine in engines:
            await engine.close()
        return [int(one[one.index("--random-seed") + 1]) for one in words]

    first, second = asyncio.run(seeds())
    assert first != second and min(first, second) >= 0 and max(first, second) < 2**31
    assert asyncio.run(seeds()) == [first, second]  # the same in a run that is repeated


def test_server_that_does_not_start_says_its_last_words(python, around):
    async def check():
        engine = Sglang(_config(python, flags={"die": True}), around)
        with pytest.raises(EngineError, match=r"(?s)did not start.*ended with 3.*CUDA out of mem"):
            await engine.health()
        await engine.close()

    asyncio.run(check())


def test_server_that_dies_makes_the_engine_say_so(python, around):
    async def check():
        engine = Sglang(_config(python), around)
        await engine.health()
        os.kill(_pids(around.directory)[0], signal.SIGKILL)
        async with asyncio.timeout(5):
            while True:
                try:
                    await engine.version()
                except EngineError as error:
                    if "the server ended" in str(error):
                        break
                await asyncio.sleep(0.05)
        await engine.close()

    asyncio.run(check())


@pytest.mark.parametrize("how", ["killed", "ends", "forgets"])
def test_server_does_not_outlive_who_started_it(python, around, tmp_path, how):
    """A worker that is killed, ends, or lets its engine go, as a stage that builds another does."""
    code = f"""
import asyncio, gc, os, pathlib, sys, time
from types import SimpleNamespace
sys.path.insert(0, {str(Path(__file__).parent)!r})
from miles import Context
from miles_plugins.engine.sglang import Sglang
class Model:
    def hf_config(self): return {{"hidden_size": 8}}
    def directory(self): return None
around = Context(directory=pathlib.Path({str(around.directory)!r}), model=Model(),
                 precision=SimpleNamespace(engine="float32", logits="float32"))
engine = Sglang(Sglang.Config(python={python!r}, device="cpu"), around)
asyncio.run(engine.health())
print("well", flush=True)
if {how!r} == "forgets":
    del engine
    gc.collect()
    time.sleep(60)
elif {how!r} == "killed":
    time.sleep(60)
os._exit(0)
"""
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout.readline() == "well\n"
        pids = _pids(around.directory)
        if how == "killed":
            assert all(map(_alive, pids))
            worker.kill()
        _gone(pids)
    finally:
        worker.kill()
        worker.wait()


def test_guard_that_is_killed_takes_its_server_along(python, around):
    async def check():
        engine = Sglang(_config(python), around)
        await engine.health()
        os.kill(engine._server.pid, signal.SIGKILL)
        pids = _pids(around.directory)
        await engine.close()
        os.kill(pids[1], signal.SIGKILL)  # the program's own child has no guard of its own
        return pids[:1]

    _gone(asyncio.run(check()))


def test_port_in_use_is_one_clear_error(python, around, monkeypatch):
    monkeypatch.setattr(server, "_CLAIM_S", 0.3)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} of 127\.0\.0\.1 is in use"):
            Sglang(_config(python, port=port), around)


def test_server_waits_for_the_port_of_the_one_that_it_replaces(python, around):
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    ending = threading.Timer(1.0, sock.close)
    ending.start()

    async def check():
        engine = Sglang(_config(python, port=sock.getsockname()[1]), around)
        await engine.health()
        await engine.close()

    asyncio.run(check())
    ending.join()


def test_no_sglang_installed_is_one_clear_error(around):
    with pytest.raises(ConfigError, match=r"has no SGLang installed.*engine\.python="):
        Sglang(_config(""), around)
    with pytest.raises(ConfigError, match="/nowhere/python cannot be run"):
        Sglang(_config("/nowhere/python"), around)


@pytest.mark.parametrize("how", ["environment", "script"])
def test_sglang_is_found_where_its_packages_are_added_to_the_path(tmp_path, monkeypatch, how):
    """A folder of packages beside an interpreter that has no SGLang of its own."""
    about = tmp_path / "site" / "sglang-0.5.16.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.16\n")
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexport PYTHONPATH={tmp_path}/site\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    added = {"PYTHONPATH": str(tmp_path / "site")}
    chosen = (str(script), {}) if how == "script" else (sys.executable, added)
    assert server.installed(*chosen) == "0.5.16"
    config = Sglang.Config(python=chosen[0], environment=chosen[1], device="cpu")
    monkeypatch.setattr(checks, "memory_here", lambda: 0)
    assert checks.check(Sglang, config, _planned()) == []
    monkeypatch.chdir(tmp_path / "site")  # where a run is started says nothing of the server
    with pytest.raises(ConfigError, match=r"or the folder of its packages as 'engine\.environ"):
        server.installed(sys.executable)


# ---------------------------------------------------------------- flags


def _flags(config, **more):
    given = {
        "model_path": "m", "dtype": "bfloat16", "logits": "bfloat16", "port": 1, "slot": 0,
        "seed": 5, "experts": False, "memory_saver": False, "in_place": False, "shown": None,
        **more,
    }  # fmt: skip
    return command.arguments("py", command.flags(config, **given))


def test_flags_follow_the_config():
    config = Sglang.Config(
        tp=4,
        dp=2,
        dp_attention=True,
        first_gpu=1,
        deterministic=True,
        memory_fraction=0.7,
        flags={"attention-backend": "triton", "disable_cuda_graph": True, "lora_paths": ["a", "b"]},
    )
    words = _flags(config, slot=2, experts=True, memory_saver=True, in_place=True)
    said = " ".join(words)
    for flag in (
        "--tp-size 4", "--dp-size 2 --enable-dp-attention", "--base-gpu-id 9", "--dtype bfloat16",
        "--enable-deterministic-inference", "--enable-return-routed-experts", "--random-seed 5",
        "--enable-memory-saver", "--disable-overlap-schedule", "--mem-fraction-static 0.7",
        "--attention-backend triton", "--disable-cuda-graph", "--lora-paths a b",
        "--load-format dummy", "--host 127.0.0.1", "--incremental-streaming-output",
    ):  # fmt: skip
        assert flag in said, flag
    assert "attention_backend" not in said
    assert "--enable-fp32-lm-head" not in said
    assert "--enable-fp32-lm-head" in _flags(config, logits="float32")
    assert "--enable-fp32-lm-head" not in _flags(config, logits="float32", dtype="float32")
    plain = " ".join(_flags(Sglang.Config(dp=2)))
    assert "--dp-size 2" in plain
    assert "dp-attention" not in plain
    repeating = Sglang.Config(flags={"incremental_streaming_output": False})
    assert "--incremental-streaming-output" not in _flags(repeating)
    spec = Sglang.Config(speculative={"algorithm": "EAGLE", "num_steps": 3})
    assert "--speculative-algorithm EAGLE --speculative-num-steps 3" in " ".join(_flags(spec))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"flags": {"port": 1}}, "flags: port follows from other keys"),
        ({"flags": {"enable_fp32_lm_head": True}}, "enable_fp32_lm_head follows from other keys"),
        ({"flags": {"--tp-size": 1}}, "flags: --tp-size follows from other keys"),
        ({"flags": {"speculative_num_steps": 1}}, "under engine.speculative, as num_steps"),
        ({"workers": 0}, "workers: 0 is less than 1"),
        ({"memory_fraction": 1.0}, "memory_fraction: 1.0 is not from 0 to below 1"),
        ({"tp": 3, "dp": 2, "dp_attention": True}, r"dp \(2\) must divide tp \(3\)"),
        ({"dp_attention": True}, "it takes at least 2 ranks"),
        ({"speculative": {"num_steps": 3}}, "speculative.algorithm is not set"),
        (
            {"speculative": {"algorithm": "EAGLE", "draft_model_path": "d"}},
            r"draft_model_path \(d\): SGLang reads every update into the draft",
        ),
        ({"prefill_url": "http://a"}, "prefill_url: it goes with engine.url"),
        ({"url": "http://a,http://a"}, "an address is there twice"),
        ({"url": "http://a", "workers": 2}, r"workers \(2\) is more than the 1 addresses"),
        ({"url": "http://a,http://b", "prefill_url": "http://c"}, "they go in pairs"),
    ],
)
def test_keys_that_cannot_be_are_refused(tmp_path, keys, message):
    with pytest.raises(ConfigError, match=message):
        Sglang(Sglang.Config(**keys), Context(directory=tmp_path))


def test_flag_that_is_no_plain_value_is_refused(python, around):
    with pytest.raises(ConfigError, match=r"flags\.odd is \{'a': 1\}"):
        Sglang(_config(python, flags={"odd": {"a": 1}}), around)


# ---------------------------------------------------------------- what `miles check` says


def _planned(**settings):
    model = SimpleNamespace(hf_config=lambda: BIG, directory=lambda: None)
    precision = SimpleNamespace(engine="bfloat16", logits="bfloat16")
    return SimpleNamespace(
        settings=Settings(**settings),
        specs={"evaluator": None},
        built={"model": model, "precision": precision},
    )


BIG = {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def test_check_names_missing_gpus_and_a_model_that_does_not_fit(python, monkeypatch):
    def said(config, count):
        card = Gpu(name="H200", total=141 << 30)
        monkeypatch.setattr(checks, "gpus_here", lambda: [card] * count)
        return "\n".join(checks.check(Sglang, config, _planned()))

    cuda = replace(_config(python), device="cuda")
    assert "there is no GPU here" in said(cuda, 0)
    assert "take a larger engine.tp" in said(cuda, 1)
    assert "131.4 GiB in bfloat16, and 1 GPU offer" in said(cuda, 1)
    assert said(replace(cuda, tp=2), 2) == ""
    text = said(replace(cuda, tp=2, workers=3, first_gpu=1), 4)
    assert "3 servers of 2 GPUs from GPU 1 on need 7 GPUs, and there are 4" in text
    monkeypatch.setattr(checks, "memory_here", lambda: 16 << 30)
    assert "this machine's memory is 16.0 GiB; take a smaller model" in said(_config(python), 0)


_HEADS = {
    "own": "self.lm_head = ParallelLMHead(1)",
    "ties": "self.lm_head = ParallelLMHead(1)\n        if config.tie_word_embeddings: pass",
    "inherits": "pass",
}


@pytest.mark.parametrize("head", _HEADS)
def test_tied_checkpoint_is_refused_by_name_where_sglang_has_a_head_of_its_own(
    tmp_path, monkeypatch, head
):
    """The proof of its first publish would find that head wrong, after the servers have started."""
    about = tmp_path / "site" / "sglang-0.5.23.dist-info"
    models = tmp_path / "site" / "sglang" / "srt" / "models"
    for folder in (about, models):
        folder.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")
    (models.parents[1] / "__init__.py").write_text("raise SystemExit('it was imported')")
    (models / "some.py").write_text(
        f"class Some(Module):\n    def __init__(self, config):\n        {_HEADS[head]}\n\n\n"
        "class Another(Module):\n    def __init__(self):\n        self.lm_head = None\n"
    )
    monkeypatch.setattr(checks, "memory_here", lambda: 0)
    around = {"PYTHONPATH": str(tmp_path / "site")}
    config = Sglang.Config(python=sys.executable, environment=around, device="cpu")

    def said(**more):
        planned = _planned()
        planned.built["model"] = SimpleNamespace(hf_config=lambda: {**BIG, **more})
        return checks.check(Sglang, config, planned)

    assert said(architectures=["Some"]) == said(architectures=["Another"]) == []
    assert said(architectures=["Another"], tie_word_embeddings=True) == []
    found = said(architectures=["Some"], tie_word_embeddings=True)
    assert len(found) == (head == "own")
    for fault in found:
        assert fault.startswith(f"Some of SGLang ({models}/some.py) has an output head of its own")
        assert "give a checkpoint whose config.json says tie_word_embeddings: false" in fault


def test_zero_is_the_value_of_a_flag():
    config = Sglang.Config(flags={"decode_log_interval": 0, "disable_radix_cache": False})
    said = " ".join(_flags(config, seed=0))
    assert "--random-seed 0" in said
    assert "--decode-log-interval 0" in said
    assert "radix" not in said


def test_second_server_takes_the_gpus_that_a_runtime_reserved_for_it(monkeypatch):
    config = Sglang.Config(tp=2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "--base-gpu-id 2" in " ".join(_flags(config, slot=1, shown=gpus_shown()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert "--base-gpu-id 0" in " ".join(_flags(config, slot=1, shown=gpus_shown()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,4,5")
    assert "--base-gpu-id 2" in " ".join(_flags(config, slot=1, shown=gpus_shown()))


def test_check_leaves_gpus_of_other_machines_to_the_runtime(python, monkeypatch):
    monkeypatch.setattr(checks, "gpus_here", lambda: [])

    def said(config, **engine):
        planned = _planned()
        planned.specs["runtime"] = Spec(kind="runtime", name="ray", config={"engine": engine})
        return checks.check(Sglang, config, planned)

    cuda = replace(_config(python), device="cuda", tp=2)
    assert said(cuda, gpus=2) == []
    assert said(cuda) == ["one server takes 2 GPUs; say so: runtime.engine.gpus=2"]
    (fault,) = said(replace(cuda, first_gpu=4), gpus=2)
    assert fault == "first_gpu is 4, and runtime=ray chooses the GPUs"


def test_servers_that_only_evaluate_claim_gpus_behind_the_others(python, monkeypatch):
    """Nobody counted them when memory was judged, and they never sleep."""
    monkeypatch.setattr(checks, "gpus_here", lambda: [Gpu(name="H200", total=141 << 30)] * 4)
    planned = _planned()
    config = replace(_config(python), device="cuda", tp=2, first_gpu=1)
    (claim,) = checks.claims(Sglang, config, planned)
    assert (claim.gpus, claim.releases) == (range(1, 3), True)
    planned.built["evaluator"] = SimpleNamespace(place="apart")
    planned.specs["evaluator"] = Spec(kind="evaluator", name="external", config={"workers": 1})
    _, claim = checks.claims(Sglang, config, planned)
    assert (claim.who, claim.gpus, claim.releases) == ("evaluation servers", range(3, 5), False)


@pytest.mark.parametrize("transport", ["ipc", "nccl", "disk"])
def test_check_gives_pairs_weights_from_files_alone(transport):
    planned = _planned()
    planned.specs["transport"] = Spec(kind="transport", name=transport)
    config = Sglang.Config(url="http://127.0.0.1:9", prefill_url="http://127.0.0.1:10")
    said = "\n".join(checks.check(Sglang, config, planned))
    assert ("use transport=disk" in said) == (transport != "disk")


def test_check_warns_of_a_speculative_algorithm_that_nobody_has(python):
    (said,) = checks.warnings(
        Sglang, _config(python, speculative={"algorithm": "EGALE"}), _planned()
    )
    assert "engine.speculative.algorithm: EGALE is not known; SGLang has " in said
    known = _config(python, speculative={"algorithm": "eagle"})
    assert checks.warnings(Sglang, known, _planned()) == []


@pytest.mark.parametrize(
    ("config", "names", "drafts"),
    [
        ({}, [], False),
        ({"num_nextn_predict_layers": 0}, ["model.layers.79.mlp.up_proj.weight"], False),
        ({"mtp_loss_scaling_factor": 0.1, "mtp_only": True}, [], False),
        ({"num_nextn_predict_layers": 1}, [], True),
        ({"text_config": {"mtp_num_hidden_layers": 1}}, [], True),
        ({}, ["mtp.fc.weight"], True),
        ({}, ["model.layers.80.eh_proj.weight"], True),
    ],
)
@pytest.mark.parametrize("index", [True, False])
def test_check_refuses_drafts_inside_a_checkpoint_that_has_none(
    tmp_path, python, config, names, drafts, index
):
    if index:
        found = {"weight_map": dict.fromkeys(names, "a.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(found))
    else:
        head = json.dumps({name: {} for name in names}).encode()
        (tmp_path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
    planned = _planned()
    model = SimpleNamespace(hf_config=lambda: {**BIG, **config}, directory=lambda: tmp_path)
    planned.built = {"model": model}

    def said(**speculative):
        return checks.check(Sglang, _config(python, speculative=speculative), planned)

    for algorithm in ("NEXTN", "eagle"):
        faults = said(algorithm=algorithm)
        assert bool(faults) != drafts
        for fault in faults:
            assert fault.startswith(
                f"speculative.algorithm is {algorithm.upper()}, and {tmp_path}/config.json "
                "declares no draft layers (num_nextn_predict_layers, or another key with nextn"
            )
            assert "algorithm=NGRAM, which drafts from the text" in fault
    assert said(algorithm="NGRAM") == said() == []


def test_check_of_drafts_survives_files_that_hold_no_weights(tmp_path, python):
    """Pointers of Git LFS, whose first bytes say a length without sense, ended in a MemoryError."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    planned = _planned()
    planned.built = {"model": SimpleNamespace(hf_config=lambda: BIG, directory=lambda: tmp_path)}
    (fault,) = checks.check(Sglang, _config(python, speculative={"algorithm": "NEXTN"}), planned)
    assert "declares no draft layers" in fault
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": [7, null]}')
    (fault,) = checks.check(Sglang, _config(python, speculative={"algorithm": "NEXTN"}), planned)
    assert "declares no draft layers" in fault


def test_check_warns_of_ranks_that_draw_alike(python):
    def said(**keys):
        return "\n".join(checks.warnings(Sglang, _config(python, **keys), _planned()))

    assert "engine.dp is 2 and engine.deterministic is false" in said(dp=2)
    assert "seeds all ranks" not in said(dp=2, deterministic=True) + said()


def test_check_asks_servers_past_a_proxy_of_the_environment(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://nowhere.invalid:1")
    monkeypatch.delenv("no_proxy", raising=False)
    found = checks.check(Sglang, Sglang.Config(url="http://127.0.0.1:9"), _planned())
    assert found == ["http://127.0.0.1:9 cannot be reached: [Errno 111] Connection refused"]


@contextmanager
def answering(reply):
    """The address of something that gives this answer to everybody."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            with suppress(OSError):  # closed at the end of the test
                while True:
                    connection = server.accept()[0]
                    with connection:
                        connection.recv(4096)
                        connection.sendall(reply)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (b"SSH-2.0-OpenSSH_9\r\n", "cannot be reached: SSH-2.0-OpenSSH_9"),
        (b"HTTP/1.1 200 OK\r\n\r\n<html>", "cannot be reached: JSON is malformed"),
        (b"HTTP/1.1 200 OK\r\n\r\n[]", "/server_info is no object"),
        (b"HTTP/1.1 401 Unauthorized\r\n\r\n", "it wants a key, in a file: engine.api_key_file"),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "answers HTTP 404 (Not Found); is it the address"),
    ],
    ids=["no-http", "no-json", "list", "no-key", "other-server"],
)
def test_check_names_an_address_where_something_else_answers(reply, words):
    with answering(reply) as url:
        (fault,) = checks.check(Sglang, Sglang.Config(url=url), _planned())
    assert fault.startswith(url) and words in fault


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({}, ""),
        ({"dtype": "auto"}, ""),
        ({"dtype": "bfloat16", "enable_fp32_lm_head": False}, ""),
        ({"dtype": "half"}, "computes in float16, and engines of this precision in bfloat16"),
        ({"enable_fp32_lm_head": True}, "was started with --enable-fp32-lm-head"),
    ],
    ids=str,
)
def test_check_holds_a_running_server_to_the_precision(info, words):
    body = json.dumps({"version": "0.5.23", **info}).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    with answering(head + body) as url:
        found = checks.check(Sglang, Sglang.Config(url=url), _planned())
    assert len(found) == bool(words)
    assert all(fault.startswith(url) and words in fault for fault in found)


def test_check_of_a_server_that_drips_does_not_hang(monkeypatch):
    """Every byte comes in time, the answer never."""
    monkeypatch.setattr(checks, "_WHOLE_S", 0.5)
    ended = threading.Event()

    def drip(server):
        with server.accept()[0] as connection, suppress(OSError):
            while not ended.wait(0.05):
                connection.sendall(b"H")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip, args=(server,), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        threading.Timer(5, ended.set).start()
        (fault,) = checks.check(Sglang, Sglang.Config(url=url), _planned())
        ended.set()
        thread.join()
    assert fault.startswith(f"{url}/server_info gave no whole answer within 0.5 s")


def test_check_of_an_interpreter_whose_child_holds_its_output_does_not_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "_SAID_S", 0.5)
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\nsleep 30 &\necho $! > {tmp_path}/child\nsleep 30\n")
    script.chmod(0o755)
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"python was not done within 0\.5 s, or left a process"):
        server.installed(str(script))
    assert time.monotonic() - start < 4
    _gone([int((tmp_path / "child").read_text())], 4.0)


def test_check_names_an_address_that_is_none():
    (fault,) = checks.check(Sglang, Sglang.Config(url="http://a b"), _planned())
    assert fault.startswith("http://a b cannot be reached: URL can't contain control characters")


def test_check_names_ports_experts_and_urls(python):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        found = checks.check(Sglang, _config(python, port=port), _planned())
        assert any(f"port {port}" in fault for fault in found)
    unreachable = Sglang.Config(url="http://127.0.0.1:9")
    found = checks.check(Sglang, unreachable, _planned())
    assert found == ["http://127.0.0.1:9 cannot be reached: [Errno 111] Connection refused"]
    session = replace(Settings().session, experts=True)
    found = checks.check(Sglang, _config(python), _planned(session=session))
    assert found == ["session.experts: the model has no experts to ask for"]


@pytest.mark.parametrize(
    ("port", "workers", "words"),
    [
        (70000, 1, "port: 70000 is not from 0 (takes free ones) to 65535"),
        (-1, 1, "port: -1 is not from 0 (takes free ones) to 65535"),
        (65535, 2, "port: 2 servers from port 65535 on need ports up to 65536, and 65535 is"),
    ],
)
def test_check_of_a_port_that_is_none_is_one_fault_and_no_traceback(python, port, workers, words):
    (fault,) = checks.check(Sglang, _config(python, port=port, workers=workers), _planned())
    assert fault.startswith(words)


@pytest.mark.parametrize("value", [0.0, -5.0, float("nan")])
@pytest.mark.parametrize(
    "name", ["start_timeout_s", "timeout_s", "update_timeout_s", "silent_s", "connect_s"]
)
def test_check_refuses_seconds_that_cannot_pass(python, name, value):
    found = checks.check(Sglang, _config(python, **{name: value}), _planned())
    assert found == [f"{name} is {value}; it must be above 0"]


def test_versions_outside_the_tested_range_and_mixed_ones_are_told():
    assert facts.doubt("0.5.16") == facts.doubt("0.5.23") == ""
    for version in ("0.5.15.post1", "0.5.24", "0.6.0"):
        assert facts.doubt(version) == (
            f"SGLang {version} was not tested with miles; tested: 0.5.16 to 0.5.23"
        )
    (said,) = facts.doubts({"http://a": "0.5.16", "http://b": "0.5.23"})
    assert "http://a has 0.5.16, http://b has 0.5.23" in said
    assert facts.doubts({"http://a": "0.5.16", "http://b": "0.5.16"}) == []


def test_check_warns_of_an_untested_version(tmp_path):
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\necho 0.7.1\n")
    path.chmod(0o755)
    (said,) = checks.warnings(Sglang, _config(str(path)), _planned())
    assert said == "engine.python: SGLang 0.7.1 was not tested with miles; tested: 0.5.16 to 0.5.23"
