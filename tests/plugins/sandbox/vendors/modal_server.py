"""Speaks Modal's gRPC, control plane and command router, over boxes of this machine, by the service
definitions in Modal's own wheel."""

from __future__ import annotations

import asyncio
import base64
import json
import time

from grpclib import GRPCError, Status
from grpclib.server import Server as GrpcServer
from host import KEY, Box, Host, serve
from modal_proto import api_pb2 as api
from modal_proto import task_command_router_pb2 as router
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase

CODES = {
    401: Status.UNAUTHENTICATED,
    404: Status.NOT_FOUND,
    429: Status.RESOURCE_EXHAUSTED,
    500: Status.INTERNAL,
    503: Status.UNAVAILABLE,
}


def complete(service: type) -> type:
    """The service with every method it leaves out answering `unimplemented`."""

    async def unimplemented(self, stream):
        await stream.recv_message()
        raise GRPCError(Status.UNIMPLEMENTED, "the local server does not speak of this")

    missing = dict.fromkeys(service.__abstractmethods__, unimplemented)
    return type(service.__name__, (service,), missing)


async def faulty(host: Host, at: str, stream, box: str = ""):
    """Do what was ordered to go wrong with a request."""
    fault = host.fault(at, box)
    if fault.get("hang_s"):
        await asyncio.sleep(fault["hang_s"])
    if not fault.get("after"):
        go_wrong(fault, stream)
    return fault


def go_wrong(fault: dict, stream) -> None:
    if fault.get("reset"):
        stream._stream._transport.abort()
        raise GRPCError(Status.UNAVAILABLE, "reset")
    if "status" in fault:
        raise GRPCError(CODES[fault["status"]], "as ordered")


class Control(ModalClientBase):
    """Apps, images, and sandboxes."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.url = ""
        self.made: dict[str, Box] = {}

    def known(self, stream) -> None:
        if stream.metadata.get("x-modal-token-secret") != KEY:
            raise GRPCError(Status.UNAUTHENTICATED, "Token ID is malformed or does not exist")

    async def ClientHello(self, stream):
        await stream.recv_message()
        await stream.send_message(api.ClientHelloResponse())

    async def AuthTokenGet(self, stream):
        await stream.recv_message()
        self.known(stream)
        claims = base64.urlsafe_b64encode(json.dumps({"exp": time.time() + 3600}).encode())
        await stream.send_message(api.AuthTokenGetResponse(token=f"x.{claims.decode()}.x"))

    async def AppGetOrCreate(self, stream):
        asked = await stream.recv_message()
        self.known(stream)
        await stream.send_message(api.AppGetOrCreateResponse(app_id=f"ap-{asked.app_name}"))

    async def EnvironmentGetOrCreate(self, stream):
        await stream.recv_message()
        settings = api.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api.EnvironmentMetadata(name="main", settings=settings)
        await stream.send_message(
            api.EnvironmentGetOrCreateResponse(environment_id="en-local", metadata=metadata)
        )

    async def ImageGetOrCreate(self, stream):
        await stream.recv_message()
        done = api.GenericResult(status=api.GenericResult.GENERIC_STATUS_SUCCESS)
        await stream.send_message(api.ImageGetOrCreateResponse(image_id="im-local", result=done))

    async def SandboxCreateV2(self, stream):
        asked = await stream.recv_message()
        self.known(stream)
        fault = await faulty(self.host, "create", stream)
        definition = asked.definition
        key = stream.metadata.get("x-idempotency-key")
        box = self.made.get(key) or self.host.create(
            {tag.tag_name: tag.tag_value for tag in asked.tags},
            {
                "timeout": definition.timeout_secs,
                "block_network": definition.network_access.network_access_type
                == api.NetworkAccess.BLOCKED,
                "app": asked.app_id,
                "cpu": definition.resources.milli_cpu,
            },
        )
        self.made[key] = box
        await asyncio.sleep(fault.get("linger_s", 0))
        go_wrong(fault, stream)
        await stream.send_message(
            api.SandboxCreateV2Response(
                sandbox_id=box.id, task_id=f"ta-{box.id}", command_router_access=self.access()
            )
        )

    def access(self) -> api.CommandRouterAccess:
        return api.CommandRouterAccess(url=self.url, jwt="x.e30.x")

    async def SandboxGetCommandRouterAccess(self, stream):
        await stream.recv_message()
        access = self.access()
        await stream.send_message(
            api.SandboxGetCommandRouterAccessResponse(url=access.url, jwt=access.jwt)
        )

    async def SandboxWaitV2(self, stream):
        asked = await stream.recv_message()
        if asked.sandbox_id not in self.host.boxes:
            raise GRPCError(Status.NOT_FOUND, f"Sandbox {asked.sandbox_id} not found")
        await stream.send_message(api.SandboxWaitResponse())

    async def SandboxTagsGetV2(self, stream):
        asked = await stream.recv_message()
        box = self.host.boxes.get(asked.sandbox_id)
        if box is None:
            raise GRPCError(Status.NOT_FOUND, f"Sandbox {asked.sandbox_id} not found")
        await stream.send_message(api.SandboxTagsGetResponse(tags=tags(box)))

    async def SandboxListV2(self, stream):
        """Two at a time, newest first, so that a client has to turn pages."""
        asked = await stream.recv_message()
        await faulty(self.host, "list", stream)
        wanted = {tag.tag_name: tag.tag_value for tag in asked.tags}
        before = asked.before_timestamp or float("inf")
        boxes = [b for b in self.host.matching(wanted) if b.created < before]
        boxes.sort(key=lambda box: -box.created)
        await stream.send_message(
            api.SandboxListResponse(
                sandboxes=[
                    api.SandboxInfo(id=box.id, created_at=box.created, tags=tags(box))
                    for box in boxes[:2]
                ]
            )
        )

    async def SandboxTerminateV2(self, stream):
        asked = await stream.recv_message()
        await faulty(self.host, "delete", stream, asked.sandbox_id)
        self.host.delete(asked.sandbox_id)
        await stream.send_message(api.SandboxTerminateResponse())


def tags(box: Box) -> list:
    return [api.SandboxTag(tag_name=k, tag_value=v) for k, v in box.labels.items()]


class Command:
    """One process: what it has said so far, and its end."""

    def __init__(self, process) -> None:
        self.process = process
        self.said = {1: bytearray(), 2: bytearray()}
        self.written = 0
        self.changed = asyncio.Condition()
        self.open = 2
        for number, stream in ((1, process.stdout), (2, process.stderr)):
            task = asyncio.create_task(self.pump(number, stream))
            setattr(self, f"pump{number}", task)

    async def pump(self, number: int, stream) -> None:
        data = b"-"
        while data:
            data = await stream.read(65536)
            async with self.changed:
                self.said[number] += data
                self.open -= not data
                self.changed.notify_all()


class Router(TaskCommandRouterBase):
    """Commands of all boxes."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.commands: dict[str, Command] = {}

    def box(self, task: str) -> Box:
        box = self.host.boxes.get(task.removeprefix("ta-"))
        if box is None:
            raise GRPCError(Status.NOT_FOUND, f"task {task} not found")
        return box

    async def TaskExecStart(self, stream):
        asked = await stream.recv_message()
        box = self.box(asked.task_id)
        fault = await faulty(self.host, "execute", stream, box.id)
        if asked.exec_id not in self.commands:
            process = await box.start(
                list(asked.command_args), cwd=asked.workdir or None, stdin=asyncio.subprocess.PIPE
            )
            self.commands[asked.exec_id] = Command(process)
        go_wrong(fault, stream)
        await stream.send_message(router.TaskExecStartResponse())

    async def TaskExecStdinWrite(self, stream):
        asked = await stream.recv_message()
        command = self.commands[asked.exec_id]
        fresh = asked.data[max(0, command.written - asked.offset) :]
        command.written += len(fresh)
        try:
            command.process.stdin.write(fresh)
            await command.process.stdin.drain()
            if asked.eof:
                command.process.stdin.close()
        except ConnectionError:
            pass  # it reads no more
        await stream.send_message(router.TaskExecStdinWriteResponse())

    async def TaskExecStdioRead(self, stream):
        asked = await stream.recv_message()
        command = self.commands[asked.exec_id]
        out = asked.file_descriptor == router.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDOUT
        number, offset = (1 if out else 2), asked.offset
        while True:
            async with command.changed:
                data = bytes(command.said[number][offset : offset + 65536])
                if not data and not command.open:
                    return
                if not data:
                    await command.changed.wait()
                    continue
            offset += len(data)
            await stream.send_message(router.TaskExecStdioReadResponse(data=data))

    async def TaskExecWait(self, stream):
        asked = await stream.recv_message()
        code = await self.commands[asked.exec_id].process.wait()
        self.box(asked.task_id)
        end = {"signal": -code} if code < 0 else {"code": code}
        await stream.send_message(router.TaskExecWaitResponse(**end))


async def start(host: Host) -> str:
    control = complete(Control)(host)
    server = GrpcServer([control, complete(Router)(host)])
    await server.start("127.0.0.1", 0)
    start.server = server
    port = server._server.sockets[0].getsockname()[1]
    control.url = f"http://127.0.0.1:{port}"
    return control.url


serve(start)
