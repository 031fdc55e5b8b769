"""What a component of each kind must be able to do, and the one table of kinds.

Every component is built as `Class(config, context)`: `config` is an instance of its own nested,
frozen `Config`; `context` is what it may know of the run. Protocols only: no behaviour lives here.
"""

from miles.protocols import around, context, kinds, model, rollout, train
from miles.protocols.around import *  # noqa: F403
from miles.protocols.context import *  # noqa: F403
from miles.protocols.kinds import *  # noqa: F403
from miles.protocols.model import *  # noqa: F403
from miles.protocols.rollout import *  # noqa: F403
from miles.protocols.train import *  # noqa: F403

__all__ = sorted(
    [
        *around.__all__,
        *context.__all__,
        *kinds.__all__,
        *model.__all__,
        *rollout.__all__,
        *train.__all__,
    ]
)
