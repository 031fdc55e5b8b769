"""The fakes as a local plugin, so that suites and runs reach them by name."""

from miles.testing import FakeEngine, FakeEnvironment, FakeTito, FakeTrainer

miles_components = {
    "engine": {"fake": FakeEngine},
    "environment": {"fake": FakeEnvironment},
    "tito": {"fake": FakeTito},
    "trainer": {"fake": FakeTrainer},
}
