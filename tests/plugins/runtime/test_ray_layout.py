"""What the ray runtime decides and refuses without Ray: layouts, files, addresses, the keeper of a
worker."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles import Caller, ConfigError, Context, Settings, Spec, WorkerError, process_alive
from miles_plugins.runtime.ray import MISSING, Ray, cluster, look
from miles_plugins.runtime.ray.cluster import reach, refusal
from miles_plugins.runtime.ray.files import seen, shared, unseen
from miles_plugins.runtime.ray.keeper import Keeper, own_address
from miles_plugins.runtime.ray.layout import (
    Node,
    Share,
    Want,
    bundles,
    gpus_of,
    lacks,
    role_of,
    wanted,
)

TOKEN = "0123456789abcdef" * 2


def node(name: str = "a", cpus: float = 8, gpus: float = 0) -> Node:
    return Node(id=name, address=f"10.0.0.{ord(name) - 96}", cpus=cpus, gpus=gpus)


def parts(*kinds: str) -> list[Spec]:
    return [Spec(kind=kind, name="any") for kind in kinds]


# ---------------------------------------------------------------- layouts


def test_role_is_told_by_the_parts() -> None:
    assert role_of(parts("model", "precision", "trainer", "transport")) == "trainer"
    assert role_of(parts("model", "precision", "engine", "transport")) == "engine"
    assert role_of(parts("model", "tito", "environment")) == "rollout"
    assert role_of(parts("model", "environment", "engine")) == "rollout"  # it replays


@given(
    world=st.integers(1, 40),
    per_node=st.integers(0, 12),
    cpus=st.integers(1, 8),
    gpus=st.integers(0, 4),
)
def test_bundles_hold_every_rank_once(world: int, per_node: int, cpus: int, gpus: int) -> None:
    made = bundles(Share(cpus=cpus, per_node=per_node), gpus, world)
    assert sum(bundle["CPU"] for bundle in made) == world * cpus
    assert sum(bundle.get("GPU", 0) for bundle in made) == world * gpus
    assert all(bundle["CPU"] <= max(per_node, 1) * cpus for bundle in made)


def test_gpus_are_one_where_there_are_any() -> None:
    assert gpus_of(Share(), [node(), node("b", gpus=4)]) == 1
    assert gpus_of(Share(), [node()]) == 0
    assert gpus_of(Share(gpus=2), [node()]) == 2


def test_too_small_a_cluster_is_told_with_all_its_numbers() -> None:
    wants = [Want("trainer", 4, 1, 1), Want("engine", 2, 1, 2)]
    assert not lacks(wants, [node(gpus=4), node("b", gpus=4)], where="it")
    (said,) = lacks(wants, [node(gpus=4)], where="the cluster 10.0.0.1:6379")
    assert said == (
        "the layout needs 8 GPUs (4 trainer x 1, 2 engine x 2), and the cluster 10.0.0.1:6379 has "
        "4; ask for fewer (runtime.trainer, runtime.engine, runtime.rollout: gpus) or add nodes"
    )


def test_worker_larger_than_every_node_is_told() -> None:
    (said,) = lacks([Want("engine", 1, 1, 8)], [node(gpus=4), node("b", gpus=4)], where="it")
    assert "engine: 1 node(s) with 1 CPUs and 8 GPUs are needed for 1 worker(s)" in said
    assert "it has 0 (10.0.0.1: 8 CPUs, 4 GPUs; 10.0.0.2: 8 CPUs, 4 GPUs)" in said


def test_ranks_of_a_node_need_that_many_nodes() -> None:
    wants = [Want("trainer", 8, 1, 1, per_node=4)]
    assert not lacks(wants, [node(gpus=4), node("b", gpus=4)], where="it")
    (said,) = lacks(wants, [node(gpus=4), node("b", gpus=2), node("c", gpus=2)], where="it")
    assert said.startswith("trainer: 2 node(s) with 4 CPUs and 4 GPUs are needed for 4 worker(s)")


def planned(**settings: Any) -> Any:
    return SimpleNamespace(
        specs={
            "trainer": Spec(kind="trainer", name="t", config={"workers": 2}),
            "engine": Spec(kind="engine", name="e", config={"workers": 3}),
            "evaluator": Spec(kind="evaluator", name="f", config={"workers": 1}),
        },
        settings=replace(Settings(), **settings),
        samples=True,
    )


def test_stage_asks_for_trainer_engines_evaluation_and_rollouts() -> None:
    found = wanted(Ray.Config(), planned(rollout_workers=2), [node(gpus=8)])
    assert found == [
        Want("trainer", 2, 1.0, 1),
        Want("engine", 3, 1.0, 1),
        Want("evaluation engine", 1, 1.0, 1),
        Want("rollout", 3, 1.0, 0),
    ]


def test_colocated_engines_ask_for_no_gpus_of_their_own() -> None:
    found = wanted(Ray.Config(), planned(placement="colocated"), [node(gpus=8)])
    assert [(want.role, want.gpus) for want in found[:2]] == [("trainer", 1), ("engine", 0)]


# ---------------------------------------------------------------- what check says


def test_check_counts_a_local_cluster_before_it_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults = Ray.check(Ray.Config(cpus=4, gpus=0), planned())
    assert len(faults) == 1 and "the layout needs 8 CPUs" in faults[0]
    assert "this machine (runtime.cpus=4, runtime.gpus=0) has 4" in faults[0]
    assert Ray.check(Ray.Config(cpus=8, gpus=0), planned()) == []
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    (fault,) = Ray.check(Ray.Config(gpus=0), planned())
    assert "this machine (runtime.cpus, which Ray only counts, may say more) has 2; ask" in fault


def test_check_without_ray_is_one_error_with_the_install_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert Ray.check(Ray.Config(), planned()) == [MISSING]
    assert "pip install 'miles[ray]'" in MISSING
    with pytest.raises(ConfigError, match=r"runtime ray: ray is not installed"):
        Ray(Ray.Config(), Context(directory=tmp_path))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"trainer": Share(cpus=-1)}, "trainer.cpus is -1; at least 0"),
        ({"rollout": Share(gpus=1)}, "rollout.gpus is 1: rollout workers use no GPU"),
        ({"network": "10.0.0"}, "write it like 10.1.0.0/16"),
        ({"address": "auto", "cpus": 4}, "cpus and gpus are for address=local"),
        ({"place_timeout_s": 0.0}, "place_timeout_s is 0; above 0"),
    ],
)
def test_check_refuses_values_that_cannot_be_meant(config: Any, said: str) -> None:
    faults = Ray.check(Ray.Config(**config))
    assert len(faults) == 1 and said in faults[0]


def test_unreachable_address_is_told_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    said = reach(f"127.0.0.1:{port}")
    assert f"address '127.0.0.1:{port}' cannot be reached" in said and "ray start --head" in said
    with pytest.raises(ConfigError, match="cannot be reached"):
        Ray.check(Ray.Config(address=f"127.0.0.1:{port}"), planned())
    assert "a Ray client cannot place workers" in reach("ray://head:10001")
    assert "is none of local, auto, HOST:PORT" in reach("head")
    assert "cannot be reached (" in reach("127.0.0.1:70000")


def test_check_of_a_ray_address_that_accepts_and_says_nothing_does_not_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster, "_REACH_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        config = Ray.Config(address=f"127.0.0.1:{server.getsockname()[1]}", start_timeout_s=10.0)
        with pytest.raises(ConfigError, match=r"says nothing in 0\.2 s, so it is no head of Ray"):
            Ray.check(config, planned())


# ---------------------------------------------------------------- files


def test_files_that_a_host_lacks_are_named_by_their_key(tmp_path: Path) -> None:
    weights = tmp_path / "model"
    weights.mkdir()
    plugin = tmp_path / "plugin.py"
    plugin.write_text("x = 1\n")
    context = Context(directory=tmp_path, plugins={"selection": {"files": [str(plugin)]}})
    model = Spec(kind="model", name="any", config={"path": str(weights), "name": "a/b/no/file"})
    with seen(context, [model], "mark") as wanted:
        assert [key for key, *_ in wanted] == ["run.dir", "model.path", "plugins.files.0"]
        assert unseen(wanted) == []
        weights.rmdir()
        plugin.write_text("x = 22\n")
        assert unseen(wanted) == [
            f"model.path: {weights} is not there",
            f"plugins.files.0: {plugin} is another file there",
        ]
    assert unseen(wanted)[0] == f"run.dir: {tmp_path}/logs/.seen-mark is not there"
    assert shared(context, []) == [["plugins.files.0", str(plugin), 7]]


# ---------------------------------------------------------------- the keeper of a worker


def order(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    made = {
        "name": "kept",
        "title": "kept",
        "token": TOKEN,
        "log": str(tmp_path / "kept.log"),
        "address": "127.0.0.1",
        "network": "",
        "environment": {"GREETING": "hello"},
        "directory": str(tmp_path),
        "files": [],
        "wait_s": 20.0,
    }
    return {**made, **changes}


def test_keeper_starts_a_worker_for_the_caller_with_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    keeper = Keeper(order(tmp_path))
    ready = keeper.ready()
    place = (ready["address"], ready["port"])
    assert place[0] == "127.0.0.1" and not ready["fault"]

    with socket.create_connection(place) as stranger:  # is turned away, and nothing is started
        stranger.sendall(b"x" * len(TOKEN))
        assert stranger.recv(1) == b""

    async def call() -> str:
        loop = asyncio.get_running_loop()
        caller = Caller("kept", lambda what: WorkerError(what))
        sock = socket.create_connection(place)
        sock.sendall(TOKEN.encode())
        sock.setblocking(False)
        await loop.create_connection(lambda: caller.connection, sock=sock)
        identity: str = await caller.call("worker.identity", [], {}, 20.0)
        caller.connection.close()
        await asyncio.sleep(0)
        return identity

    identity = asyncio.run(call())  # which hangs up, so the worker ends
    report = keeper.wait()
    assert (report["code"], report["fault"]) == (0, "")
    assert report["tail"].startswith("--- kept on ")
    assert not process_alive(identity)
    with pytest.raises(ConnectionError):
        socket.create_connection(place)


def test_keeper_kills_a_worker_that_does_not_end(tmp_path: Path) -> None:
    keeper = Keeper(order(tmp_path))
    ready = keeper.ready()
    with socket.create_connection((ready["address"], ready["port"])) as caller:
        caller.sendall(TOKEN.encode())
        while keeper._process is None:
            threading.Event().wait(0.01)
        number = keeper._process.pid
        inside = Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
        assert b"GREETING=hello" in inside
        assert not [each for each in inside if each.startswith(b"RAY_")]
        assert keeper.stacks().startswith("at ")  # though it has hardly begun
        assert "(most recent call first)" in (tmp_path / "kept.log").read_text()
        assert keeper._process.poll() is None
        keeper.end(0.0)
        assert keeper.wait()["code"] == -9
        assert not Path(f"/proc/{number}").exists()


def test_keeper_gives_up_when_nobody_calls(tmp_path: Path) -> None:
    keeper = Keeper(order(tmp_path, wait_s=0.3))
    assert keeper.wait()["fault"] == "nobody with its token called within 0.3 s"


def test_keeper_says_what_its_host_lacks(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    keeper = Keeper(order(tmp_path, files=[["model.path", gone, -1]]))
    assert keeper.ready()["fault"] == (
        f"model.path: {gone} is not there: all hosts need one file system, mounted at the same "
        "place"
    )
    keeper.end(0.0)
    keeper = Keeper(order(tmp_path, network="203.0.113.0/24"))
    assert "has no address in 203.0.113.0/24" in keeper.ready()["fault"]
    keeper.end(0.0)


def test_network_chooses_the_address_of_a_host() -> None:
    assert own_address("10.9.9.9", "") == "10.9.9.9"
    assert own_address("10.9.9.9", "127.0.0.0/8") == "127.0.0.1"
    assert own_address("10.9.9.9", "127.0.0.1/32") == "127.0.0.1"


def test_ray_is_not_imported_by_any_of_this() -> None:
    import subprocess
    import sys

    code = "import sys, miles_plugins.runtime.ray.placing as p; sys.exit('ray' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ})


def test_cluster_that_is_not_there_is_told_without_flags_that_miles_does_not_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ray_says = (
        "Could not find any running Ray instance. Please specify the one to connect to by setting "
        "`--address` flag or `RAY_ADDRESS` environment variable."
    )
    said = refusal("auto", ray_says)
    assert "flag" not in said and "no Ray cluster runs on this machine" in said
    assert refusal("10.0.0.1:6379", "no route") == "cannot connect to '10.0.0.1:6379': no route"

    def connected(address: str, **_: Any) -> Any:
        raise ConfigError(f"runtime ray: {said}")

    monkeypatch.setattr(look, "connected", connected)
    monkeypatch.setattr("sys.argv", ["look", "auto"])
    assert look.main() == 1
    assert capsys.readouterr().err.strip() == said, "who asks for it says which runtime"
