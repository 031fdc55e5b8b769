"""What plugin authors test with: fakes, builders of data, and one contract suite per kind.

Nothing here is used by a run, and importing this package imports no torch, hydra or stevedore.
A plugin's whole contract test is

    @pytest.mark.miles_contract("environment", "reverse")
    def test_reverse_keeps_the_contract(miles_contract):
        miles_contract()
"""

from miles.testing.bigram import FakeEngine, FakeTrainer
from miles.testing.boxes import FakeBox, FakeSandbox
from miles.testing.handle import FakeHandle
from miles.testing.playing import Played, play_episode, tool_call
from miles.testing.prefix import CachingEngine, PrefixCache
from miles.testing.samples import context, make_group, make_sample
from miles.testing.served import FakeServedSession, fake_serve
from miles.testing.tasks import FakeEnvironment, FakeTito

__all__ = [
    "CachingEngine",
    "FakeBox",
    "FakeEngine",
    "FakeEnvironment",
    "FakeHandle",
    "FakeSandbox",
    "FakeServedSession",
    "FakeTito",
    "FakeTrainer",
    "Played",
    "PrefixCache",
    "context",
    "fake_serve",
    "make_group",
    "make_sample",
    "play_episode",
    "tool_call",
]
