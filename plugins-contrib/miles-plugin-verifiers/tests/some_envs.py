"""Environments as authors of the verifiers library write them, one of each kind."""

import verifiers as vf
from datasets import Dataset

KEPT = {}


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one number
        b: another number
    """
    return a + b


def rows(count):
    return Dataset.from_list(
        [{"question": f"{i} + {i}?", "answer": str(2 * i)} for i in range(count)]
    )


def last(completion):
    return str(completion[-1].content or "") if completion else ""


def right(completion, answer):
    return float(answer in last(completion))


class Twice(vf.MultiTurnEnv):
    """Asks a second time."""

    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Are you sure?"}]


def briefest(completions, **kwargs):
    """A reward that compares the attempts of a group."""
    sizes = [len(last(c)) for c in completions]
    return [float(size == min(sizes)) for size in sizes]


def load_environment(kind="single", count=8):
    rubric = vf.Rubric(funcs=[right])
    if kind == "tool":
        return vf.ToolEnv(tools=[add], dataset=rows(count), rubric=rubric)
    if kind == "twice":
        return Twice(max_turns=2, dataset=rows(count), rubric=rubric)
    if kind == "group":
        return vf.SingleTurnEnv(dataset=rows(count), rubric=vf.Rubric(funcs=[briefest]))
    if kind == "evaluation":
        return vf.SingleTurnEnv(eval_dataset=rows(count), rubric=rubric)
    if kind == "gym":
        return vf.ReasoningGymEnv(gym="chain_sum", num_train_examples=6, num_eval_examples=3)
    if kind == "broken":

        class Broken(vf.MultiTurnEnv):
            async def env_response(self, messages, state, **kwargs):
                raise KeyError("lost")

        return Broken(max_turns=3, dataset=rows(count), rubric=rubric)
    return vf.SingleTurnEnv(dataset=rows(count), rubric=rubric)
