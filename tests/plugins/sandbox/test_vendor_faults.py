"""What goes wrong at vendors: each fault through the vendor's own SDK, against a local server that
was told to fail."""

from __future__ import annotations

import asyncio
import logging
import pickle
import time

import pytest

from miles import ConfigError, SandboxError, Task, process_alive

pytestmark = pytest.mark.slow

OWN_TRIES = {"modal": 4}
"""How often an SDK itself makes a request that is answered with an internal error."""

TASK = Task(id="folder/task 7", prompt="")


def play(case, script, **changes):
    """Run `await script(sandbox)`, and let go of connections."""

    async def run():
        sandbox = case.sandbox(**changes)
        try:
            return await script(sandbox)
        finally:
            await sandbox.close()

    return asyncio.run(run())


def fails(case, script, **changes) -> SandboxError:
    with pytest.raises(SandboxError) as caught:
        play(case, script, **changes)
    error = caught.value
    assert str(error).startswith(f"sandbox {case.name}: ")
    back = pickle.loads(pickle.dumps(error))
    assert (str(back), back.retryable) == (str(error), error.retryable)
    return error


async def opens(sandbox):
    box = await sandbox.open(TASK)
    await box.close()


# ---------------------------------------------------------------- before the run


def test_missing_credentials_are_one_error_before_the_run(named, monkeypatch) -> None:
    monkeypatch.delenv(named.kind.secret)
    faults = named.component.check(named.config(), None)
    assert (
        len(faults) == 1 and "no credentials: set" in faults[0] and named.kind.secret in faults[0]
    )
    with pytest.raises(ConfigError, match=f"sandbox {named.name}: no credentials"):
        named.sandbox()
    assert not named.vendor.boxes() and not named.vendor.asked("create")


def test_good_credentials_and_values_have_no_faults(named) -> None:
    assert list(named.component.check(named.config(), None)) == []


def test_values_that_cannot_be_are_faults(named) -> None:
    faults = named.component.check(named.config(attempts=0, lifetime_s=-1), None)
    assert [f.partition(":")[0] for f in faults] == ["lifetime_s", "attempts"]


def test_sdk_that_is_not_installed_is_named_with_its_extra(named, monkeypatch) -> None:
    monkeypatch.setattr(named.component, "package", "no_such_sdk_anywhere")
    (fault,) = named.component.check(named.config(), None)
    assert "no_such_sdk_anywhere" in fault and f'pip install "miles[{named.kind.package}]"' in fault


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"url": "sandboxes.local"}, "url: 'sandboxes.local' is no address; give http(s)://HOST"),
        ({"url": ""}, "url: '' is no address"),
        ({"box_url": "ftp://x"}, "box_url: 'ftp://x' is no address"),
        ({"api_key_env": "NO_SUCH_KEY"}, "no credentials: set NO_SUCH_KEY to a key of http"),
    ],
)
def test_agentenv_without_address_or_key_is_refused(open_vendor, changes, said) -> None:
    named = open_vendor("agentenv")
    (fault,) = named.component.check(named.config(**changes), None)
    assert fault.startswith(said)


def test_agentenv_finds_its_boxes_at_its_own_address(open_vendor) -> None:
    named = open_vendor("agentenv")

    async def script(sandbox):
        box = await sandbox.open(TASK)
        assert (await box.exec("echo here")).stdout == "here\n"
        assert [b.id for b in await sandbox.list()] == [box.id]
        await box.close()

    play(named, script)
    assert named.vendor.boxes() == []


def test_daytona_image_and_snapshot_exclude_each_other(open_vendor) -> None:
    named = open_vendor("daytona")
    (fault,) = named.component.check(named.config(image="a", snapshot="b"), None)
    assert fault == "image (a) and snapshot (b): choose one"
    (fault,) = named.component.check(named.config(cpu=2), None)
    assert fault.startswith("cpu, memory_gib and disk_gib need an image")


def test_daytona_image_comes_with_its_resources(open_vendor) -> None:
    named = open_vendor("daytona")

    async def script(sandbox):
        box = await sandbox.open(TASK)
        (request,) = [b["request"] for b in named.vendor.boxes()]
        await box.close()
        return request

    request = play(named, script, image="debian:12", cpu=2, memory_gib=4)
    assert (request["cpu"], request["memory"], request.get("disk")) == (2, 4, None)
    assert "FROM debian:12" in request["buildInfo"]["dockerfileContent"]


# ---------------------------------------------------------------- creation


def test_refused_credentials_are_not_tried_again(case, monkeypatch) -> None:
    monkeypatch.setenv(case.kind.secret, "wrong")
    error = fails(case, opens)
    assert not error.retryable and "attempts" not in str(error)
    assert not case.vendor.boxes()


def test_creation_waits_as_long_as_a_busy_server_asks(case, caplog) -> None:
    case.vendor.order("create", status=429, headers={"Retry-After": "1"})
    began = time.monotonic()
    play(case, opens)
    first, second = case.vendor.asked("create")
    asked_to = 0.2 if case.name == "modal" else 0.95  # gRPC has no such header
    assert second["time"] - first["time"] > asked_to and time.monotonic() - began < 15


def test_creation_is_tried_again_and_says_so(case, caplog) -> None:
    tries = OWN_TRIES.get(case.name, 1)
    case.vendor.order("create", status=500, times=2 * tries)
    with caplog.at_level(logging.WARNING, "miles.sandbox"):
        play(case, opens)
    said = [r.getMessage() for r in caplog.records if "attempt" in r.getMessage()]
    assert len(said) == 2 and "attempt 2 of 5, again in" in said[1]
    assert "'folder/task 7'" in said[0] and len(case.vendor.asked("create")) == 2 * tries + 1


def test_creation_that_never_succeeds_ends_as_retryable(case) -> None:
    case.vendor.order("create", status=500, times=50)
    error = fails(case, opens, attempts=2)
    assert error.retryable and str(error).endswith("(after 2 attempts)")
    assert len(case.vendor.asked("create")) == 2 * OWN_TRIES.get(case.name, 1)


def test_box_of_a_creation_that_failed_half_way_is_removed(case) -> None:
    tries = OWN_TRIES.get(case.name, 1)
    case.vendor.order("create", status=500, after=True, times=tries)

    async def script(sandbox):
        box = await sandbox.open(TASK)
        assert [b["id"] for b in case.vendor.boxes()] == [box.id]
        await box.close()

    play(case, script)
    assert len(case.vendor.asked("create")) == tries + 1


def test_cancelling_a_creation_leaves_no_box(case) -> None:
    case.vendor.order("create", status=500, after=True, linger_s=20)

    async def script(sandbox):
        opening = asyncio.create_task(sandbox.open(TASK))
        async with asyncio.timeout(20):
            while not case.vendor.boxes():
                await asyncio.sleep(0.05)
        opening.cancel()
        await asyncio.wait([opening], timeout=20)
        assert opening.cancelled()

    play(case, script)
    assert case.vendor.boxes() == []


def test_looking_for_a_box_that_was_left_is_tried_again(case) -> None:
    tries = OWN_TRIES.get(case.name, 1)
    case.vendor.order("create", status=500, after=True, times=tries)
    case.vendor.order("list", status=500, times=tries)

    async def script(sandbox):
        box = await sandbox.open(TASK)
        assert [b["id"] for b in case.vendor.boxes()] == [box.id]
        await box.close()

    play(case, script)


def test_server_that_does_not_answer_is_retryable(case) -> None:
    case.vendor.order("create", hang_s=30)
    began = time.monotonic()
    error = fails(case, opens, open_timeout_s=1, attempts=1)
    assert error.retryable and time.monotonic() - began < 20


# ---------------------------------------------------------------- use


def test_box_that_was_deleted_meanwhile_is_gone(case) -> None:
    async def script(sandbox):
        box = await sandbox.open(TASK)
        await sandbox.remove(box.id)
        for use in (box.exec("true"), box.read("x")):
            with pytest.raises(SandboxError) as caught:
                await use
            assert not caught.value.retryable
        await box.close()
        await box.close()
        return caught.value

    error = play(case, script)
    assert "is gone" in error.detail


def test_missing_file_is_not_taken_for_a_missing_box(case) -> None:
    async def script(sandbox):
        box = await sandbox.open(TASK)
        try:
            await box.read("no/such/file")
        finally:
            await box.close()

    error = fails(case, script)
    assert not error.retryable and "gone" not in error.detail and "no/such/file" in error.detail


def test_command_that_was_turned_away_is_repeated(case) -> None:
    async def script(sandbox):
        box = await sandbox.open(TASK)
        case.vendor.order("execute", status=429, headers={"Retry-After": "0"})
        result = await box.exec("echo once >> log; cat log")
        assert (result.stdout, result.exit_code) == ("once\n", 0)
        await box.close()

    play(case, script)


def test_command_whose_fate_is_unknown_is_not_repeated(case) -> None:
    async def script(sandbox):
        box = await sandbox.open(TASK)
        case.vendor.order("execute", reset=True, after=True)
        if case.name == "modal":  # its SDK asks again under the same key, and so gets the answer
            await box.exec("echo once >> log")
        else:
            with pytest.raises(SandboxError) as caught:
                await box.exec("echo once >> log")
            assert caught.value.retryable
        assert await box.read("log") == b"once\n"
        await box.close()

    play(case, script)


def test_box_that_dies_ends_its_command(case) -> None:
    async def script(sandbox):
        box = await sandbox.open(TASK)
        case.vendor.order("execute", die_s=0.5)
        began = time.monotonic()
        try:
            await box.exec("sleep 60")
        finally:
            assert time.monotonic() - began < 20
            await box.close()

    assert not fails(case, script).retryable
    assert not case.vendor.boxes()


def test_slow_read_has_its_own_limit(case) -> None:
    at = "execute" if case.name == "modal" else "download"

    async def script(sandbox):
        box = await sandbox.open(TASK)
        await box.write("x", b"1")
        case.vendor.order(at, hang_s=5)
        try:
            await box.read("x")
        finally:
            await box.close()

    error = fails(case, script, request_timeout_s=1, attempts=1)
    assert error.retryable and "cannot read 'x'" in str(error)


def test_file_that_is_too_large_is_not_read_to_its_end(case) -> None:
    async def script(sandbox):
        box = await sandbox.open(TASK)
        await box.exec("head -c 3000000 /dev/zero > large")
        try:
            await box.read("large")
        finally:
            await box.close()

    error = fails(case, script, file_mb=1)
    assert "'large': FileTooLarge: larger than the 1 MiB" in str(error) and not error.retryable


def test_read_is_tried_again(case) -> None:
    at = "execute" if case.name == "modal" else "download"

    async def script(sandbox):
        box = await sandbox.open(TASK)
        await box.write("x", b"1")
        case.vendor.order(at, status=503)
        assert await box.read("x") == b"1"
        await box.close()

    play(case, script)


def test_deleting_that_fails_is_said_and_not_raised(case, caplog) -> None:
    async def script(sandbox):
        box = await sandbox.open(TASK)
        case.vendor.order("delete", status=500, times=50)
        with caplog.at_level(logging.WARNING, "miles.sandbox"):
            await box.close()
        return box.id

    id = play(case, script, attempts=2)
    assert any(
        id in r.getMessage() and "miles sandboxes clean" in r.getMessage() for r in caplog.records
    )


# ---------------------------------------------------------------- labels


def test_boxes_are_listed_and_removed_by_label(case) -> None:
    async def script(sandbox):
        other = case.sandbox(run="another-run")
        boxes = [await sandbox.open(TASK) for _ in range(3)] + [await other.open(TASK)]
        listed = await sandbox.list()
        assert {b.id for b in listed} == {b.id for b in boxes}
        assert sorted(b.run for b in listed) == ["a-run"] * 3 + ["another-run"]
        for box in listed:
            assert process_alive(box.owner) is True and box.task == "folder-task-7"
            assert abs(box.created - time.time()) < 60 and box.state
        for box in listed:
            await sandbox.remove(box.id)
        await sandbox.remove(boxes[0].id)  # gone already
        assert list(await sandbox.list()) == []
        await other.close()

    play(case, script)
    assert not case.vendor.boxes()


def test_box_ends_by_itself_and_has_no_network_unless_asked(case) -> None:
    async def script(sandbox):
        box = await sandbox.open(TASK)
        (request,) = [b["request"] for b in case.vendor.boxes()]
        await box.close()
        return request

    for network in (False, True):
        request = play(case, script, lifetime_s=90, network=network)
        match case.kind.package:
            case "daytona":
                assert request["ttlMinutes"] == 2 and request["autoDeleteInterval"] == 0
                assert request["networkBlockAll"] is not network
            case "e2b":
                assert request["timeout"] == 90
                assert request["allow_internet_access"] is network
            case "modal":
                assert request["timeout"] == 90 and request["block_network"] is not network
