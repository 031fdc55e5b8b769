"""An OpenEnv environment with tools, as its authors write them."""

from uuid import uuid4

from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction
from openenv.core.env_server.types import Action, Observation, State


class Calculator(MCPEnvironment):
    """Adds."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp = FastMCP("calculator")

        @mcp.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        super().__init__(mcp)
        self._state = State(episode_id=str(uuid4()), step_count=0)

    def reset(self, seed=None, episode_id=None, question="2 + 3?", **more):
        return Observation(done=False, metadata={"question": question})

    def _step_impl(self, action: Action, timeout_s=None, **more):
        raise ValueError(f"unknown action {action}")

    def step(self, action, timeout_s=None, **more):
        seen = super().step(action, timeout_s=timeout_s, **more)
        self._state.step_count += 1
        return self._scored(action, seen)

    async def step_async(self, action, timeout_s=None, **more):
        seen = await super().step_async(action, timeout_s=timeout_s, **more)
        return self._scored(action, seen)

    def _scored(self, action, seen):
        if isinstance(action, CallToolAction):
            seen.reward = float(action.arguments == {"a": 2, "b": 3})
        return seen

    @property
    def state(self):
        return self._state


app = create_fastapi_app(Calculator, Action, Observation, max_concurrent_envs=8)
