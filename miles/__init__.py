"""miles: post-training of language models as a small core loop and plugins.

This module is the public facade: data types, errors, protocols and the hook marker. Start reading
at `miles.loop`. It imports no torch, hydra or stevedore.
"""

from miles import batch, episode, errors, machine, protocols, types
from miles.batch import *  # noqa: F403
from miles.episode import *  # noqa: F403
from miles.errors import *  # noqa: F403
from miles.folders import unwritable
from miles.hookspecs import hookimpl
from miles.identity import process_alive, process_identity
from miles.machine import *  # noqa: F403
from miles.protocols import *  # noqa: F403
from miles.seeds import derive_seed
from miles.serving.child_server import ChildServer, serve_child
from miles.serving.daemon import asked_to_stop, secret_in
from miles.settings import RunKeys, SessionKeys, Settings
from miles.stacks import answer_with_stacks, log_tail, stacks_held, stacks_of
from miles.threads import Threads, in_thread
from miles.types import *  # noqa: F403
from miles.wire.calls import Caller, call_ranks, keep_alive, whereabouts

__version__ = "0.1.0"
__all__ = [
    "Caller",
    "ChildServer",
    "RunKeys",
    "SessionKeys",
    "Settings",
    "Threads",
    "answer_with_stacks",
    "asked_to_stop",
    "call_ranks",
    "derive_seed",
    "hookimpl",
    "in_thread",
    "keep_alive",
    "log_tail",
    "process_alive",
    "process_identity",
    "secret_in",
    "serve_child",
    "stacks_held",
    "stacks_of",
    "unwritable",
    "whereabouts",
    *batch.__all__,
    *episode.__all__,
    *errors.__all__,
    *machine.__all__,
    *protocols.__all__,
    *types.__all__,
]
