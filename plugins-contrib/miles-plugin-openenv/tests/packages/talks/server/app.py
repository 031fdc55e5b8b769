"""A server that prints more than a pipe holds, as it is imported and with every request."""

print("loading")


async def app(scope, receive, send):
    if scope["type"] == "http":
        print("a step " * 20_000)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"yes"})
